"""NeMo Gym's environment servers on one machine, kept up until a signal comes: checked, restarted, stopped completely.

    GYM_PYTHON environment_servers.py --host 10.0.0.5 --port 18080 --servers 2 --log-dir logs --ready-file logs/urls

Server i listens on port + i. Exit code 0: stopped by TERM or INT; 1: gave up, or could not start; 2: wrong usage.
It runs with the servers' own Python (.venv-gym) as well as with the trainer's, so a node without the trainer's
container can run it: it imports nothing that cpu/requirements-gym.lock doesn't hold.
"""

import argparse
import asyncio
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from cpu.gym_server import GYM_VENV, GymServer
from cpu.processes import ProcessError
from whole_file import write_whole

POLL_S = 0.2
LEAST_FAILED_CHECKS = 3
LONGEST_CHECK_S = 20.0
RESTART_WINDOW_S = 3600.0
LONGEST_DELAY_S = 30.0
STOP_GRACE_S = 5.0
"""How long a server may take to close its browsers: it cancels its requests after 0.5 s and needs well under 1 s."""


@dataclass(frozen=True)
class Patience:
    """When a server is restarted, and when it is given up on; times in seconds."""

    health_interval_s: float = 5.0
    hung_after_s: float = 60.0
    """How long every check must have failed before a live process counts as hung."""
    start_timeout_s: float = 180.0
    max_restarts: int = 20
    """Restarts of one server within RESTART_WINDOW_S."""

    @property
    def check_timeout_s(self) -> float:
        """How long one check waits for its answer, so that LEAST_FAILED_CHECKS fit into hung_after_s."""
        return min(LONGEST_CHECK_S, self.hung_after_s / LEAST_FAILED_CHECKS)


class Silence:
    """Tells a hung server from a slow one: only an unbroken run of failed checks counts, whatever each one took."""

    def __init__(self, hung_after_s: float):
        self._hung_after_s = hung_after_s
        self._since: float | None = None
        self._failed = 0

    def checked(self, asked_at: float, now: float, answered: bool) -> float | None:
        """Return for how many seconds the server has not answered, once that is too long; None while it may be slow."""
        if answered:
            self._since, self._failed = None, 0
            return None
        if self._since is None:
            self._since = asked_at
        self._failed += 1
        # More than one check: a machine that was suspended finds its one check long overdue, the server being healthy.
        hung = self._failed >= LEAST_FAILED_CHECKS and now - self._since >= self._hung_after_s
        return now - self._since if hung else None


class RestartBudget:
    """The restarts of one server: at once the first time, then ever later, and only so many within a window."""

    def __init__(self, most: int):
        self.most = most
        self._taken: deque[float] = deque()

    @property
    def used(self) -> int:
        """How many restarts were taken within the window, as of the last take()."""
        return len(self._taken)

    def take(self, now: float) -> float | None:
        """Return the seconds to wait before the next restart; None when no restart is left."""
        while self._taken and now - self._taken[0] >= RESTART_WINDOW_S:
            self._taken.popleft()
        if self.used >= self.most:
            return None
        self._taken.append(now)
        return 0.0 if self.used == 1 else min(LONGEST_DELAY_S, 2.0 ** (self.used - 2))


class KeptServer:
    """One server: started, watched and restarted on its port."""

    def __init__(self, server: GymServer, url: str, patience: Patience, say: Callable[[str], None]):
        """`url` is the address that clients use and messages name; `say` takes one line about an event."""
        self.server = server
        self.url = url
        self.up = asyncio.Event()
        """Set once the server has answered for the first time."""
        self._patience = patience
        self._say = say
        self._budget = RestartBudget(patience.max_restarts)

    async def keep_up(self, http: aiohttp.ClientSession) -> None:
        """Keep the server up until cancelled; its processes are then left to whoever cancelled.

        Raises ProcessError when it never came up (a restart would end the same way) or has no restart left.
        """
        broken = await self._come_up(http)
        if broken:
            raise ProcessError(f"{self.url} {broken} (log: {self.server.log_path})")
        self.up.set()
        while True:
            broken = await self._until_broken(http)
            while broken:
                await self._make_way(broken)
                broken = await self._come_up(http)

    async def _make_way(self, broken: str) -> None:
        """Return when it is time to start the server again. Raises ProcessError when no restart is left."""
        self.server.kill()  # a dead server's browsers may have outlived it; a hung one would not end by itself
        delay_s = self._budget.take(time.monotonic())
        if delay_s is None:
            raise ProcessError(
                f"{self.url} {broken}, after {self._budget.most} restarts within {RESTART_WINDOW_S / 60:g} minutes"
                f" (log: {self.server.log_path})"
            )
        wait = f" in {delay_s:g} s" if delay_s else ""
        self._say(f"{self.url} {broken}, restart {self._budget.used} of {self._budget.most}{wait}")
        await asyncio.sleep(delay_s)

    async def _come_up(self, http: aiohttp.ClientSession) -> str | None:
        """Return None once a newly started server answers, or how that went wrong."""
        started = time.monotonic()
        try:
            self.server.launch()
        except ProcessError as error:
            return f"could not be started: {error}"
        while not await self._answers(http):
            if self.server.exit_code is not None:
                code, tail = self.server.exit_code, self.server.log_tail()
                return f"ended with exit code {code} before it answered: {tail}"
            if time.monotonic() - started > self._patience.start_timeout_s:
                return f"did not answer within {self._patience.start_timeout_s:g} s of its start"
            await asyncio.sleep(POLL_S)
        self._say(f"{self.url} is up after {time.monotonic() - started:.1f} s (process {self.server.pid})")
        return None

    async def _until_broken(self, http: aiohttp.ClientSession) -> str:
        """Return how the running server broke, once it did."""
        silence = Silence(self._patience.hung_after_s)
        while True:
            next_check = time.monotonic() + self._patience.health_interval_s
            while (left_s := next_check - time.monotonic()) > 0 and self.server.running:
                await asyncio.sleep(min(POLL_S, left_s))
            if not self.server.running:
                return f"died (exit code {self.server.exit_code})"
            asked_at = time.monotonic()
            answered = await self._answers(http)
            silent_s = silence.checked(asked_at, time.monotonic(), answered)
            if silent_s is not None and self.server.running:
                return f"does not answer since {silent_s:.0f} s"

    async def _answers(self, http: aiohttp.ClientSession) -> bool:
        """Return whether the server answers, whatever the status: that its event loop runs is all that is asked."""
        timeout = aiohttp.ClientTimeout(total=self._patience.check_timeout_s)
        try:
            async with http.get(self.server.health_url, timeout=timeout, allow_redirects=False):
                return True
        except (aiohttp.ClientError, TimeoutError, OSError):  # refused, reset, timed out
            return False


async def keep_all_up(kept: Sequence[KeptServer], ready_file: Path | None, stop: asyncio.Event) -> None:
    """Return when `stop` is set and no process of the servers is left. Raises ProcessError: one was given up on.

    The ready file holds the addresses, separated by commas, from when all are up until the first one is stopped.
    """
    # No connection is kept: each check then also shows that the server takes new ones.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        keeping = [asyncio.create_task(one.keep_up(http)) for one in kept]
        stopping = asyncio.create_task(stop.wait())
        announcing = asyncio.create_task(_announce(kept, ready_file))
        pending = {*keeping, stopping, announcing}
        try:
            while not stop.is_set():
                over, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in over:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if ready_file:
                ready_file.unlink(missing_ok=True)
            await _stop_all(kept)


async def _stop_all(kept: Sequence[KeptServer]) -> None:
    """Return when no process of the servers is left. Raises ProcessError when one can't be ended."""
    loop = asyncio.get_running_loop()
    # A thread for each, so that all have the same grace; nothing is started any more that could die with its thread.
    with ThreadPoolExecutor(len(kept)) as pool:
        stops = [loop.run_in_executor(pool, one.server.stop, STOP_GRACE_S) for one in kept]
        ends = await asyncio.gather(*stops, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _announce(kept: Sequence[KeptServer], ready_file: Path | None) -> None:
    """Write the ready file once all servers have come up; it appears complete or not at all."""
    for one in kept:
        await one.up.wait()
    if ready_file:
        write_whole(ready_file, (",".join(one.url for one in kept) + "\n").encode())


def say(line: str) -> None:
    """Print one line about an event, with its time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} environment: {line}", flush=True)


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments; leaves with exit code 2 on wrong usage."""
    patience = Patience()
    parser = argparse.ArgumentParser(prog="environment_servers.py", description=__doc__.splitlines()[0])
    parser.add_argument("--host", required=True, help="address of this machine to listen on, and to tell clients")
    parser.add_argument("--advertise", metavar="NAME", help="host to tell clients instead; needed with 0.0.0.0")
    parser.add_argument("--port", type=int, required=True, help="port of the first server; server i takes port + i")
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="how many (default 1)")
    parser.add_argument("--log-dir", type=Path, required=True, help="folder for each server's log (appended)")
    parser.add_argument("--ready-file", type=Path, help="holds the servers' addresses once all are up")
    parser.add_argument("--gym-venv", type=Path, default=GYM_VENV, help="environment that cpu/setup.sh gym has made")
    for option, default, what in (
        ("--health-interval", patience.health_interval_s, "seconds between two checks of a server"),
        ("--hung-after", patience.hung_after_s, "seconds of failed checks after which a server is restarted"),
        ("--start-timeout", patience.start_timeout_s, "seconds that a server may take to start"),
    ):
        parser.add_argument(option, type=float, default=default, metavar="S", help=f"{what} (default {default:g})")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=patience.max_restarts,
        metavar="N",
        help=f"restarts of one server within {RESTART_WINDOW_S / 60:g} minutes (default {patience.max_restarts})",
    )
    arguments = parser.parse_args(argv)
    problem = _problem(arguments)
    if problem:
        parser.error(problem)
    try:
        for folder in (arguments.log_dir, *([arguments.ready_file.parent] if arguments.ready_file else [])):
            folder.mkdir(parents=True, exist_ok=True)
        if arguments.ready_file:  # of an earlier run that was killed
            arguments.ready_file.unlink(missing_ok=True)
    except OSError as error:
        parser.error(f"--log-dir or --ready-file can't be used: {error}")
    return arguments


def _problem(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments' values; None when nothing is."""
    for option, host in (("--host", arguments.host), ("--advertise", arguments.advertise)):
        if host is not None and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
            return f"{option} {host!r}: must be an IPv4 address or a host name, without scheme and port"
    if arguments.host == "0.0.0.0" and not arguments.advertise:
        return "--host 0.0.0.0 is no address that a client can use: name this machine with --advertise as well"
    if arguments.servers < 1:
        return f"--servers {arguments.servers}: must be at least 1"
    last = arguments.port + arguments.servers - 1
    if not 1 <= arguments.port <= last <= 65535:
        return f"--port {arguments.port} with {arguments.servers} servers: ports must lie between 1 and 65535"
    for option in ("health_interval", "hung_after", "start_timeout"):
        if not 0 < getattr(arguments, option) < float("inf"):
            value = getattr(arguments, option)
            return f"--{option.replace('_', '-')} {value}: must be a number of seconds above 0"
    if arguments.max_restarts < 0:
        return f"--max-restarts {arguments.max_restarts}: must be at least 0"
    return None


def _kept_servers(arguments: argparse.Namespace) -> list[KeptServer]:
    """Return the servers, none of them started. Raises ProcessError when one could not be."""
    patience = Patience(
        arguments.health_interval, arguments.hung_after, arguments.start_timeout, arguments.max_restarts
    )
    kept = []
    for port in range(arguments.port, arguments.port + arguments.servers):
        server = GymServer(
            port,
            arguments.log_dir / f"environment-{port}.log",
            host=arguments.host,
            gym_venv=arguments.gym_venv,
            # Killed by force, this program can stop nothing; a server's Playwright drivers end when it has.
            dies_with_parent=True,
        )
        server.require_startable()
        kept.append(KeptServer(server, f"http://{arguments.advertise or arguments.host}:{port}", patience, say))
    return kept


async def _until_signal(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kept = _kept_servers(arguments)
    say(f"starting {len(kept)} server{'s' if len(kept) > 1 else ''}; logs: {arguments.log_dir}/environment-PORT.log")
    await keep_all_up(kept, arguments.ready_file, stop)
    say("stopped by a signal; no server is left")


def main(argv: list[str] | None = None) -> int:
    """Keep the servers up until a signal comes. Return 0 then, 1 when one is given up on; wrong usage exits with 2."""
    arguments = _parsed(argv)
    try:
        asyncio.run(_until_signal(arguments))
    except (ProcessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
