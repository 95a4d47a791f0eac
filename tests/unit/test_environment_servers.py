"""Environment servers kept up: the program with a stand-in server that dies, hangs and leaves browsers on demand."""

import asyncio
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cpu.gym_server import GymServer
from cpu.processes import free_port, parents
from environment_servers import KeptServer, Patience, RestartBudget, Silence, keep_all_up, main
from tests.servers_program import ServersProgram, free_ports
from tests.stand_in_gym import stand_in_venv


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return stand_in_venv(tmp_path / "gym")


@pytest.fixture
def start(tmp_path: Path, venv: Path) -> Iterator[Callable[..., ServersProgram]]:
    """Return a function that starts the program over stand-in servers."""
    with ExitStack() as programs:

        def start(*options: str, servers: int = 1) -> ServersProgram:
            given = ("--gym-venv", str(venv), "--health-interval", "0.1", *options)
            return programs.enter_context(ServersProgram(tmp_path, *given, servers=servers))

        yield start


def ask(url: str, path: str) -> int:
    with urllib.request.urlopen(url + path, timeout=30) as response:
        return int(response.read())


def die(url: str) -> None:
    with pytest.raises(OSError):  # it ends before it answers
        ask(url, "/die")


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():  # pytest's timeout ends a failure
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_server_and_all_that_it_started(start, number):
    program = start(servers=2)
    pids = program.up() | program.up()
    assert set(pids) == {program.url(0), program.url(1)}
    browsers = [ask(url, "/browser") for url in pids]
    assert {*browsers, *pids.values()} <= set(program.left())
    code, output = program.end(number)
    assert (code, program.left()) == (0, [])
    assert "stopped by a signal" in output


def test_the_ready_file_holds_all_addresses_while_the_servers_are_kept_up(start, venv, tmp_path):
    (venv / "START").write_text("later")
    (tmp_path / "urls").write_text("http://of-an-earlier-run:1\n")
    program = start(servers=2)
    program.line("starting 2 servers")
    assert not program.ready_file.exists()
    (venv / f"GO-{program.port}").touch()
    program.up()
    for _ in range(20):  # answers, so that a file which is written too early is there by then
        ask(program.url(0), "/pid")
    assert not program.ready_file.exists()
    (venv / f"GO-{program.port + 1}").touch()
    program.up()
    wait_until(program.ready_file.exists)
    assert program.ready_file.read_text() == f"{program.url(0)},{program.url(1)}\n"
    assert [path.name for path in tmp_path.glob("urls*")] == ["urls"]
    program.end(signal.SIGTERM)
    assert not program.ready_file.exists()


def test_a_server_that_dies_is_back_on_its_port_without_its_old_browsers(start):
    program = start(servers=2)
    before = program.up() | program.up()
    browser, kept_browser = ask(program.url(0), "/browser"), ask(program.url(1), "/browser")
    die(program.url(0))
    program.line(rf"{program.url(0)} died \(exit code 3\), restart 1 of 20$")
    assert set(after := program.up()) == {program.url(0)}
    assert ask(program.url(0), "/pid") == after[program.url(0)] != before[program.url(0)]
    assert ask(program.url(1), "/pid") == before[program.url(1)]
    assert browser not in parents()
    assert kept_browser in parents()


def test_a_server_that_hangs_is_restarted(start):
    program = start("--hung-after", "3")
    before = program.up()
    ask(program.url(), "/hang")
    program.line(rf"{program.url()} does not answer since [3-9] s, restart 1 of 20$")
    assert program.up() != before
    ask(program.url(), "/pid")


def test_a_restart_that_fails_is_tried_again_later(start, venv):
    program = start()
    program.up()
    (venv / "START").write_text("7")
    die(program.url())
    program.line("restart 1 of 20$")
    program.line(r"ended with exit code 7 before it answered: stand-in: cannot start, restart 2 of 20 in 1 s$")
    (venv / "START").write_text("well")
    program.up()


def test_a_server_that_keeps_dying_is_given_up_on_and_the_others_are_stopped(start):
    program = start("--max-restarts", "1", servers=2)
    assert len(program.up() | program.up()) == 2
    die(program.url(1))
    program.line("restart 1 of 1$")
    program.up()
    die(program.url(1))
    log = program.log_dir / f"environment-{program.port + 1}.log"
    says = rf"^error: {program.url(1)} died \(exit code 3\), after 1 restarts within 60 minutes \(log: {log}\)$"
    program.line(says)
    assert program.end()[0] == 1
    assert (program.left(), program.ready_file.exists()) == ([], False)


@pytest.mark.parametrize(
    ("begins", "options", "says"),
    [
        ("7", (), r"ended with exit code 7 before it answered: stand-in: cannot start \(log: .*environment-\d+\.log\)"),
        ("never", ("--start-timeout", "1"), r"did not answer within 1 s of its start \(log: .*environment-\d+\.log\)"),
    ],
    ids=["ends", "never answers"],
)
def test_a_server_that_never_came_up_ends_the_program_with_1(start, venv, begins, options, says):
    (venv / "START").write_text(begins)
    program = start(*options, "--hung-after", "0.6")
    program.line(f"^error: {program.url()} {says}$")
    assert program.end()[0] == 1
    assert (program.left(), program.ready_file.exists()) == ([], False)


def test_a_signal_while_a_server_starts_ends_it(start, venv):
    (venv / "START").write_text("never")
    program = start()
    program.line("starting 1 server;")
    wait_until(lambda: program.left() != [])
    code, _ = program.end(signal.SIGTERM)
    assert (code, program.left()) == (0, [])


def test_the_servers_end_with_a_program_that_is_killed(start):
    program = start(servers=2)
    pids = program.up() | program.up()
    program.end(signal.SIGKILL)
    wait_until(lambda: not set(pids.values()) & set(parents()))


def test_clients_can_be_told_another_name_than_the_address_that_is_listened_on(start):
    program = start("--host", "0.0.0.0", "--advertise", "localhost")
    (url,) = program.up()
    assert url == f"http://localhost:{program.port}"
    wait_until(program.ready_file.exists)
    assert program.ready_file.read_text() == f"{url}\n"
    assert ask(url, "/pid") == ask(program.url(), "/pid")


def test_a_port_in_use_is_said_before_any_server_starts(venv, tmp_path, capsys):
    with socket.socket() as taken:
        first = free_ports(2)
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        assert main([*usual(tmp_path, first), "--servers", "2", "--gym-venv", str(venv)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"error: port {first + 1} is in use")
    assert (said.out, list((tmp_path / "logs").iterdir())) == ("", [])


def test_an_address_of_another_machine_is_refused(venv, tmp_path, capsys):
    arguments = [*usual(tmp_path, free_port()), "--gym-venv", str(venv), "--host", "192.0.2.1"]
    assert main(arguments) == 1
    assert "must be an address of this machine" in capsys.readouterr().err


def usual(folder: Path, port: int = 18080) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(port), "--log-dir", str(folder / "logs")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "http://10.0.0.5"], "--host 'http://10.0.0.5': must be an IPv4 address or a host name"),
        (["--host", "::1"], "--host '::1': must be an IPv4 address"),
        (["--advertise", "node1:18080"], "--advertise 'node1:18080': must be"),
        (["--host", "0.0.0.0"], "with --advertise as well"),
        (["--servers", "0"], "--servers 0: must be at least 1"),
        (["--port", "65535", "--servers", "2"], "ports must lie between 1 and 65535"),
        (["--port", "0"], "ports must lie between 1 and 65535"),
        (["--health-interval", "0"], "--health-interval 0.0: must be a number of seconds above 0"),
        (["--hung-after", "nan"], "--hung-after nan: must be"),
        (["--start-timeout", "inf"], "--start-timeout inf: must be"),
        (["--max-restarts", "-1"], "--max-restarts -1: must be at least 0"),
        (["--ready-file", "/dev/null/urls"], "--log-dir or --ready-file can't be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_with_2_and_one_line(tmp_path, capsys, arguments, says):
    with pytest.raises(SystemExit) as caught:
        main([*usual(tmp_path), *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


async def test_a_ready_file_that_cannot_be_written_stops_the_servers(venv, tmp_path):
    server = GymServer(free_port(), tmp_path / "log", gym_venv=venv)
    kept = KeptServer(server, server.url, Patience(), lambda line: None)
    with pytest.raises(FileNotFoundError):
        await keep_all_up([kept], tmp_path / "no-such-folder/urls", asyncio.Event())
    assert server.pids() == []


@pytest.mark.parametrize(
    ("checks", "hung"),
    [
        # (asked at, answered or given up on at, answered)
        ([(0, 20, False), (25, 45, False), (50, 70, False)], 70),
        ([(0, 0, False), (5, 5, False), (10, 10, False)], None),
        ([(0, 0, False), (30, 30, False), (60, 60, False)], 60),
        ([(0, 20, False), (25, 45, False), (50, 69, True), (75, 95, False), (100, 120, False)], None),
        ([(0, 11, True), (16, 27, True), (32, 43, True), (48, 59, True), (64, 75, True)], None),
        ([(0, 900, False)], None),
        ([(0, 900, False), (905, 925, False), (930, 930, True)], None),
    ],
    ids=[
        "no check answered",
        "not for long enough",
        "just long enough",
        "one late answer in between",
        "always slow",
        "suspended",
        "suspended, then slow",
    ],
)
def test_only_an_unbroken_silence_counts_as_hung(checks, hung):
    silence = Silence(hung_after_s=60)
    said = [silence.checked(*check) for check in checks]
    assert said == [None] * (len(checks) - 1) + [hung]


def test_all_checks_of_a_hung_server_fit_into_its_silence():
    assert [Patience(hung_after_s=s).check_timeout_s for s in (3, 60, 600)] == [1, 20, 20]


@pytest.mark.parametrize(
    ("times", "delays"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 8, 16, 30, 30]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 4, 8, 16, 30, 30, None]),
        ([0, 3599, 3600, 7300], [0, 1, 1, 0]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 3600], [0, 1, 2, 4, 8, 16, 30, 30, None, 30]),
    ],
    ids=["ever later", "none left", "old ones are forgotten", "one left again"],
)
def test_restarts_are_rationed(times, delays):
    budget = RestartBudget(most=8)
    assert [budget.take(float(now)) for now in times] == delays


def test_no_restart_at_all_may_be_asked_for():
    assert RestartBudget(most=0).take(0.0) is None
