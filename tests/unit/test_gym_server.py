"""What starting the environment server says when something is missing; the server itself is in tests/contract."""

import socket
from pathlib import Path

import pytest

from cpu import gym_server
from cpu.gym_server import GymServer
from cpu.processes import ProcessError, free_port


@pytest.fixture
def venv(tmp_path, monkeypatch) -> Path:
    """Return a .venv-gym that looks complete but whose server ends at once with the word `broken`."""
    folder = tmp_path / ".venv-gym"
    server = folder / "lib/python3.11/site-packages/resources_servers/interactive_browser"
    server.mkdir(parents=True)
    (server / "app.py").touch()
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text("#!/bin/sh\necho broken $1 in $NEMO_GYM_CONFIG_PATH\nexit 3\n")
    (folder / "bin/python").chmod(0o755)
    (folder / "pw-browsers").mkdir()
    (folder / "pw-browsers/CHROMIUM").write_text("/bin/true\n")
    monkeypatch.setattr(gym_server, "GYM_VENV", folder)
    return folder


def remove_environment(venv: Path) -> None:
    venv.rename(venv.with_name("elsewhere"))


def remove_server(venv: Path) -> None:
    next(venv.rglob("app.py")).unlink()


def remove_setup_of_browser(venv: Path) -> None:
    (venv / "pw-browsers/CHROMIUM").unlink()


def remove_browser(venv: Path) -> None:
    (venv / "pw-browsers/CHROMIUM").write_text("/no/such/chromium\n")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_environment, r"\.venv-gym is missing.*make setup"),
        (remove_server, r"no interactive_browser server.*make setup"),
        (remove_setup_of_browser, r"no browser is set up.*make setup"),
        (remove_browser, r"browser /no/such/chromium is missing.*make setup"),
        (lambda venv: None, r"ended with exit code 3 before it answered: broken app\.py in interactive_browser"),
    ],
    ids=["no environment", "no server", "no set-up", "no browser", "ends at once"],
)
def test_what_is_missing_is_one_clear_line(venv, tmp_path, damage, says):
    damage(venv)
    server = GymServer(free_port(), tmp_path / "log")
    with pytest.raises(ProcessError, match=says) as caught:
        server.start(timeout_s=20)
    assert "\n" not in str(caught.value)
    assert (server.running, server.pids()) == (False, [])


def test_a_port_in_use_is_said_before_anything_starts(venv, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ProcessError, match=f"port {port} is in use"):
            GymServer(port, tmp_path / "log").start()


def test_another_environment_and_address_can_be_given(venv, tmp_path, monkeypatch):
    given = venv.rename(tmp_path / "given")  # the usual place is empty now
    (given / "bin/python").write_text('#!/bin/sh\necho "$NEMO_GYM_CONFIG_DICT" in $PLAYWRIGHT_BROWSERS_PATH\n')
    monkeypatch.chdir(tmp_path)
    server = GymServer(free_port(), Path("log"), host="127.0.0.2", gym_venv=Path("given"))
    assert server.url == f"http://127.0.0.2:{server.port}"
    with pytest.raises(ProcessError, match="ended with exit code 0"):
        server.start(timeout_s=20)
    said = server.log_path.read_text()
    assert f"host: 127.0.0.2\n      port: {server.port}\n" in said
    assert f"in {given}/pw-browsers" in said


def test_stopping_a_server_that_never_started_is_harmless(tmp_path):
    server = GymServer(free_port(), tmp_path / "log")
    server.stop()
    server.kill()
    assert (server.pid, server.pids(), server.browser_pids()) == (None, [], [])


def test_the_command_line_ends_with_1_and_one_line(venv, tmp_path, capsys):
    remove_browser(venv)
    assert gym_server.main(["--port", str(free_port()), "--log", str(tmp_path / "log")]) == 1
    assert capsys.readouterr().err.startswith("error: the environment server's browser /no/such/chromium is missing")
