"""Processes that stop completely: started in their own session, found again with all that they started, and ended.

Linux only: descendants are read from /proc. Chromium and Ray leave the process group of whoever started them, so the
group alone is not enough; every process started here carries a mark in its environment, which its descendants inherit.
"""

import ctypes
import errno
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

MARK_VARIABLE = "RECIPE_PROCESS_TREE"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOG_TAIL_LINES = 5


class ProcessError(RuntimeError):
    """A process could not be started, or ended before it was ready; the text is one line and says what to do."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on this TCP port of 127.0.0.1."""
    return _bind_error(port, "127.0.0.1") is None


def require_free_port(port: int, purpose: str, host: str = "127.0.0.1") -> None:
    """Return nothing when a server could listen there; otherwise raise ProcessError: one line that says what to do."""
    error = _bind_error(port, host)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise ProcessError(f"port {port} is in use; stop what listens there (ss -ltnp) or give {purpose} another port")
    raise ProcessError(
        f"{purpose} can't listen on {host}:{port}: {error.strerror}; the host must be an address of this machine,"
        " and a port below 1024 needs root"
    )


def parents() -> dict[int, int]:
    """Return every process's parent, {pid: parent pid}; zombies are left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name, in parentheses, may hold spaces: the fields after it are state and parent.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        if state != "Z":
            found[int(entry.name)] = int(parent)
    return found


def process_tree(roots: Iterable[int], mark: str) -> list[int]:
    """Return the sorted pids of living processes that are roots, carry the mark, or descend from one of those."""
    marked = f"{MARK_VARIABLE}={mark}".encode()
    roots = set(roots)
    parent_of = parents()
    members = {pid for pid in parent_of if pid in roots or marked in _environment(pid)}
    pending = True
    while pending:
        # Chromium's sandboxed children hide their environment: they belong through their parents.
        pending = {pid for pid, parent in parent_of.items() if parent in members and pid not in members}
        members |= pending
    return sorted(members)


def command_line(pid: int) -> str:
    """Return the process's command line, or "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_all(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal to each process that still lives."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


class ProcessTree:
    """One program and all that it starts, in a session of its own so that a Ctrl-C in the terminal doesn't reach it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str],
        cwd: Path,
        dies_with_parent: bool = False,
    ):
        """Start the program; its output is appended to the log. Raises ProcessError when it can't be executed.

        `dies_with_parent`: the kernel kills the program (not what it has started) when the thread that runs this ends.
        """
        self.name = name
        self.log_path = log_path
        self.mark = uuid.uuid4().hex
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**env, MARK_VARIABLE: self.mark},
                    cwd=cwd,
                    start_new_session=True,
                    preexec_fn=_death_with(os.getpid()) if dies_with_parent else None,
                )
            except OSError as error:
                raise ProcessError(f"{name} could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """The program's own process id."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def pids(self) -> list[int]:
        """Return the living processes of this tree, the program's own among them; [] when all have ended."""
        return process_tree([] if self.exit_code is not None else [self.pid], self.mark)

    def log_tail(self) -> str:
        """Return the last lines of what this program wrote, joined into one line."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-LOG_TAIL_LINES:]) or "(no output)"

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask the program to end, give it the time to do so, then kill whatever of its tree is left."""
        if self.exit_code is None:
            kill_all([self.pid], signal.SIGTERM)
            try:
                self._popen.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass  # killed below
        self.kill()

    def kill(self) -> None:
        """Kill the whole tree at once and return when nothing of it is left; raise ProcessError if something is."""
        deadline = time.monotonic() + 10
        # More than once: a process may start another one between the look and the kill.
        while left := self.pids():
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name}: processes {left} do not end, even killed")
            kill_all(left)
            self._popen.poll()
            time.sleep(0.02)
        self._popen.wait()


def http_answers(url: str, timeout_s: float = 2.0) -> bool:
    """Return whether anything answers HTTP at this address, whatever the status."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine is never behind a proxy
    try:
        opener.open(url, timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return True
    except OSError:  # refused, reset, timed out
        return False
    return True


def wait_until_answers(tree: ProcessTree, url: str, timeout_s: float) -> None:
    """Return when the address answers HTTP. Raises ProcessError when the program ends first, or the time does."""
    deadline = time.monotonic() + timeout_s
    while not http_answers(url):
        if tree.exit_code is not None:
            raise ProcessError(
                f"{tree.name} ended with exit code {tree.exit_code} before it answered: {tree.log_tail()}"
                f" (log: {tree.log_path})"
            )
        if time.monotonic() > deadline:
            raise ProcessError(
                f"{tree.name} did not answer {url} within {timeout_s:g} s: {tree.log_tail()} (log: {tree.log_path})"
            )
        time.sleep(0.1)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""  # ended meanwhile, or another user's


def _bind_error(port: int, host: str) -> OSError | None:
    """Return why a server could not listen there; None when it could."""
    with socket.socket() as probe:
        # A server's own listening socket sets this too: connections of an ended server in TIME_WAIT don't matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:  # socket.gaierror, for an unknown name, is one too
            return error
    return None


def _death_with(parent: int) -> Callable[[], None]:
    """Return what a new process runs before its program, so that it is killed once its parent has ended."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec only the call itself is safe

    def ask_for_it() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # ended before it was asked for
            os._exit(1)

    return ask_for_it
