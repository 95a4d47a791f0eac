"""environment_servers.py over real servers with real browsers, run by the servers' own Python as on a cluster."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from cpu.gym_server import GYM_VENV
from cpu.processes import command_line, parents, process_tree
from smoke_environment import SHIPPED_PAGE, check
from tests.contract.episodes import exchange
from tests.servers_program import ServersProgram

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], ServersProgram]]:
    """Return a function that starts the program over a number of real servers."""
    with ExitStack() as programs:

        def start(servers: int) -> ServersProgram:
            program = ServersProgram(tmp_path, servers=servers, python=str(GYM_VENV / "bin/python"))
            return programs.enter_context(program)

        yield start


async def open_session(url: str, server: int) -> list[int]:
    """Return the processes that the server runs once a session is open, which nothing closes: drivers and browsers."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        assert (await exchange(http, f"{url}/seed_session", {"initial_url": SHIPPED_PAGE}))[0] == 200
    below = [pid for pid in process_tree([server], mark="of no process") if pid != server]
    assert any("--remote-debugging" in command_line(pid) for pid in below)
    return below


async def episode_is_healthy(url: str) -> bool:
    lines: list[str] = []
    report = await check(url, SHIPPED_PAGE, 60, lines.append)
    return report.healthy or pytest.fail("\n".join(lines))


async def test_a_killed_server_is_back_with_new_browsers_and_a_signal_leaves_nothing(start):
    program = start(2)
    pids = program.up() | program.up()
    assert sorted(pids) == [program.url(0), program.url(1)]
    for url in pids:
        assert await episode_is_healthy(url)
    lost = await open_session(program.url(0), pids[program.url(0)])
    kept = await open_session(program.url(1), pids[program.url(1)])
    # A browser that runs ends by itself when its server does; one that is stuck does not.
    stuck = [pid for pid in lost if "--remote-debugging" in command_line(pid)]
    for pid in stuck:
        os.kill(pid, signal.SIGSTOP)
    os.kill(pids[program.url(0)], signal.SIGKILL)
    program.line(rf"{program.url(0)} died \(exit code -9\), restart 1 of 20$")
    assert set(program.up()) == {program.url(0)}
    running = set(parents())
    assert (running & set(lost), set(kept) - running) == (set(), set())
    assert await episode_is_healthy(program.url(0))
    assert set(kept) <= set(program.left())
    code, _ = program.end(signal.SIGTERM, timeout_s=15)
    assert (code, program.left()) == (0, [])


async def test_servers_and_browsers_end_with_a_program_that_is_killed(start):
    program = start(1)
    ((url, server),) = program.up().items()
    processes = {server, *await open_session(url, server)}
    program.end(signal.SIGKILL)
    while processes & set(parents()):  # pytest's timeout ends a failure
        pass
