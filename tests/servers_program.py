"""environment_servers.py as a program that a test starts, listens to and ends."""

import random
import re
import signal
import subprocess
import sys
from pathlib import Path

from cpu.processes import MARK_VARIABLE, parents, port_is_free, process_tree

ROOT = Path(__file__).resolve().parents[1]


def free_ports(count: int) -> int:
    """Return the first of this many neighbouring ports of 127.0.0.1 that nothing listens on."""
    while True:
        # Below the ports that Linux gives to outgoing connections, which take one at any moment.
        first = random.randrange(20_000, 32_000)
        if all(port_is_free(port) for port in range(first, first + count)):
            return first


class ServersProgram:
    """The running program. Use as a context manager: whatever happens, no process of its servers is left."""

    def __init__(self, folder: Path, *options: str, servers: int = 1, python: str = sys.executable):
        """Start it; its logs and its ready file lie in the folder."""
        self.port = free_ports(servers)
        self.ready_file = folder / "urls"
        self.log_dir = folder / "logs"
        command = [python, "environment_servers.py", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--servers", str(servers), "--log-dir", str(self.log_dir), "--ready-file", str(self.ready_file)]
        self.process = subprocess.Popen(
            [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._marks: set[str] = set()

    def url(self, server: int = 0) -> str:
        """Return the address of one of the servers."""
        return f"http://127.0.0.1:{self.port + server}"

    def line(self, pattern: str) -> re.Match[str]:
        """Return the match of the next printed line that holds the pattern; fails when the program ends before."""
        for line in self.process.stdout:
            self._note_marks()
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the program ended without a line with {pattern!r}")

    def up(self) -> dict[str, int]:
        """Return the next server that is said to be up, {address: process id}."""
        match = self.line(r"environment: (http://\S+) is up after [\d.]+ s \(process (\d+)\)")
        return {match[1]: int(match[2])}

    def end(self, number: signal.Signals | None = None, timeout_s: float = 15.0) -> tuple[int, str]:
        """Return exit code and the rest of the output, after a signal if one is given."""
        self._note_marks()
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def left(self) -> list[int]:
        """Return the living processes of all servers that were seen up, their browsers among them."""
        self._note_marks()
        return sorted({pid for mark in self._marks for pid in process_tree([], mark)})

    def _note_marks(self) -> None:
        for pid, parent in parents().items():
            if parent == self.process.pid and (mark := mark_of(pid)):
                self._marks.add(mark)

    def __enter__(self) -> "ServersProgram":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGTERM, timeout_s=30)
        self.process.stdout.close()
        for pid in self.left():  # only after a failed test
            subprocess.run(["kill", "-KILL", str(pid)], check=False)


def mark_of(pid: int) -> str | None:
    """Return the mark that cpu.processes gave this process; None when it has none."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [value for name, _, value in (v.partition(b"=") for v in variables) if name.decode() == MARK_VARIABLE]
    return found[0].decode() if found else None
