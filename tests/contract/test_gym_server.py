"""The environment server as a program of its own: python -m cpu.gym_server."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpu.processes import MARK_VARIABLE, free_port, parents, port_is_free

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(120)


def children(pid: int) -> list[int]:
    return [child for child, parent in parents().items() if parent == pid]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly(tmp_path, number):
    port = free_port()
    command = [sys.executable, "-m", "cpu.gym_server", "--port", str(port), "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline().startswith(f"environment server on http://127.0.0.1:{port} ")
        (server,) = children(program.pid)
        assert MARK_VARIABLE.encode() in Path(f"/proc/{server}/environ").read_bytes()
        program.send_signal(number)
        assert program.wait(30) == 0
    assert server not in parents()
    assert port_is_free(port)


def test_a_server_that_dies_ends_the_program_with_1(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "cpu.gym_server", "--port", str(port), "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.readline()
        (server,) = children(program.pid)
        subprocess.run(["kill", "-KILL", str(server)], check=True)
        _, errors = program.communicate(timeout=30)
    assert program.returncode == 1
    assert "ended by itself" in errors
