"""Many smoke episodes at once: is the environment healthy at the number of sessions that a training will hold open?

A fast server would never see the whole number at once, since its first episodes are over before the last ones begin. So
sessions are opened until all of them are open, and only then does the first one go on. After that, the next episode
takes the place of each that ends. A session counts from before its seed until after its close, and seeds and verifies
share one limit, as at the gate of a training (gate_core.py).
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from recipe_settings import RecipeSettings, shares
from rollout_failures import Call, FailureKind, failure_of
from smoke_episode import Report, Smoke, StepFailed, http_session, new_report

REFUSED_IN_A_ROW = 10
"""Seeds in a row whose connection a server refuses, after which it gets no more."""


class Ended(StrEnum):
    """Why a run was over."""

    EPISODES = "episodes"  # all were played
    DURATION = "duration"
    REFUSED = "refused"  # every server was given up on
    INTERRUPTED = "interrupted"  # SIGINT
    TERMINATED = "terminated"  # SIGTERM


STOPPED = frozenset({Ended.INTERRUPTED, Ended.TERMINATED})
_SIGNALS = {signal.SIGINT: Ended.INTERRUPTED, signal.SIGTERM: Ended.TERMINATED}


@dataclass(frozen=True)
class LoadPlan:
    """What a run may do at most. Every total is split over the servers as evenly as possible."""

    servers: tuple[str, ...]
    """Base addresses, without trailing slashes."""
    start_pages: tuple[str, ...]
    """Taken in turn by the episodes."""
    concurrency: int
    """Sessions open at once, from before their seed until after their close."""
    episodes: int
    duration_s: float
    """After this no episode begins."""
    seeds_at_once: int
    """Seeds and verifies under way at once."""
    settings: RecipeSettings
    """Holds the deadline of each call."""

    @property
    def longest_episode_s(self) -> float:
        """Seconds of an episode whose every call takes until its deadline: how long a run may outlast its duration."""
        s = self.settings
        return s.seed_timeout_s + 4 * s.act_timeout_s + s.verify_timeout_s + s.close_timeout_s

    def problem(self) -> str | None:
        """Return what is wrong with the plan, or None."""
        n = len(self.servers)
        if self.episodes < self.concurrency:
            return f"--episodes {self.episodes}: fewer than --concurrency {self.concurrency}, which could never be open"
        for option, total in (("--concurrency", self.concurrency), ("--seeds-at-once", self.seeds_at_once)):
            if total < n:
                return f"{option} {total}: must be at least 1 for each of the {n} servers"
        return None


@dataclass(frozen=True)
class ServerCounts:
    """What one server was seen to hold."""

    url: str
    concurrency: int
    """Its share of the sessions."""
    peak_open: int
    """Most sessions that were open at once, between the answered seed and the verify."""
    given_up: bool
    """It refused the connections of REFUSED_IN_A_ROW seeds in a row."""


@dataclass(frozen=True)
class LoadRun:
    """A run that is over."""

    plan: LoadPlan
    ended: Ended
    elapsed_s: float
    peak_open: int
    """Most sessions that were open at once over all servers."""
    servers: tuple[ServerCounts, ...]
    episodes: tuple[Report, ...]
    """Every episode whose seed was sent, in that order."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    planned: int
    healthy: int
    failed: int
    open: int
    """Sessions open at this moment."""
    elapsed_s: float


async def run_load(plan: LoadPlan, watch: Callable[[Progress], None] | None = None, every_s: float = 10.0) -> LoadRun:
    """Return what a run measured; `watch` is told every `every_s` seconds how far it is.

    SIGINT and SIGTERM end it early: sessions are closed, for at most the close's deadline; a second signal takes its
    usual course. Without signals it ends `longest_episode_s` and one close after its duration at the latest.
    """
    return await _Load(plan).run(watch or (lambda progress: None), every_s)


class _Deadlines:
    """The settings' deadlines, and once the run is being stopped, what is left until it has to be over."""

    def __init__(self, settings: RecipeSettings):
        act_s = settings.act_timeout_s
        self._limits = {Call.SEED: settings.seed_timeout_s, Call.VERIFY: settings.verify_timeout_s}
        self._limits |= {call: act_s for call in Call if call not in (Call.SEED, Call.VERIFY, Call.CLOSE)}
        self._close_s = settings.close_timeout_s
        self._over_at: float | None = None

    def stop(self) -> None:
        if self._over_at is None:
            self._over_at = time.monotonic() + self._close_s

    def limit_s(self, call: Call) -> float:
        if call is not Call.CLOSE:
            return self._limits[call]
        return self._close_s if self._over_at is None else max(self._over_at - time.monotonic(), 0.1)

    def grace_s(self) -> float:
        # Half of it, so that as much is left for the close of a session whose seed is answered in time.
        return self.limit_s(Call.CLOSE) / 2


class _Server:
    """One server during a run."""

    def __init__(self, url: str, sessions: int, episodes: int, seeds_at_once: int):
        self.url = url
        self.sessions = sessions
        self.left = episodes
        self.slots = asyncio.Semaphore(seeds_at_once)
        self.refused = 0
        self.open = 0
        self.peak_open = 0

    @property
    def given_up(self) -> bool:
        return self.refused >= REFUSED_IN_A_ROW


class _Load:
    """A run: one worker for each session that may be open, which plays one episode after the other."""

    def __init__(self, plan: LoadPlan):
        n = len(plan.servers)
        split = (shares(total, n) for total in (plan.concurrency, plan.episodes, plan.seeds_at_once))
        self._plan = plan
        self._servers = [_Server(url, *numbers) for url, *numbers in zip(plan.servers, *split, strict=True)]
        self._deadlines = _Deadlines(plan.settings)
        self._ended: Ended | None = None
        self._episodes: list[Report] = []
        self._over: list[Report] = []
        self._workers: list[asyncio.Task[None]] = []
        self._all_open = asyncio.Event()
        self._waiting = 0
        self._out_of_work = 0
        self._open = 0
        self._peak_open = 0
        self._began_at = time.monotonic()

    async def run(self, watch: Callable[[Progress], None], every_s: float) -> LoadRun:
        loop = asyncio.get_running_loop()
        self._workers = [asyncio.create_task(self._work(s)) for s in self._servers for _ in range(s.sessions)]
        watching = asyncio.create_task(self._watch(watch, every_s))
        plan = self._plan
        timers = [
            loop.call_later(plan.duration_s, self._end, Ended.DURATION),
            loop.call_later(plan.duration_s + plan.longest_episode_s, self._cancel),
        ]
        try:
            with _signals(loop, self._stop):
                done, _ = await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            watching.cancel()
            for timer in timers:
                timer.cancel()
            for worker in self._workers:
                worker.cancel()
        for worker in done:
            if not worker.cancelled():
                worker.result()  # raises what is a mistake of this module
        watch(self._progress())
        return self._result()

    def _result(self) -> LoadRun:
        refused = all(server.given_up for server in self._servers)
        ended = self._ended or (Ended.REFUSED if refused else Ended.EPISODES)
        if ended is Ended.DURATION and len(self._episodes) == self._plan.episodes:
            ended = Ended.EPISODES  # its time ran out while the last ones were under way
        counts = tuple(ServerCounts(s.url, s.sessions, s.peak_open, s.given_up) for s in self._servers)
        elapsed_s = time.monotonic() - self._began_at
        return LoadRun(self._plan, ended, elapsed_s, self._peak_open, counts, tuple(self._episodes))

    def _end(self, why: Ended) -> None:
        """Let no further episode begin; those that are open go on."""
        self._ended = self._ended or why

    def _stop(self, why: Ended) -> None:
        """End the run now, closing what is open."""
        self._ended = why
        self._cancel()

    def _cancel(self) -> None:
        self._deadlines.stop()
        for worker in self._workers:
            worker.cancel()

    async def _watch(self, watch: Callable[[Progress], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            watch(self._progress())

    def _progress(self) -> Progress:
        healthy = sum(report.healthy for report in self._over)
        failed = len(self._over) - healthy
        return Progress(self._plan.episodes, healthy, failed, self._open, time.monotonic() - self._began_at)

    async def _work(self, server: _Server) -> None:
        try:
            while server.left and self._may_begin(server):
                server.left -= 1
                await self._play(server)
        finally:
            self._out_of_work += 1
            self._see_whether_all_are_open()

    def _may_begin(self, server: _Server) -> bool:
        return self._ended is None and not server.given_up

    async def _play(self, server: _Server) -> None:
        async with http_session() as http:
            async with server.slots:
                if not self._may_begin(server):
                    return
                # No await lies between the choice of the page and the episode's place in the list.
                pages = self._plan.start_pages
                report = new_report(server.url, pages[len(self._episodes) % len(pages)])
                self._episodes.append(report)
                episode = Smoke(http, report, self._deadlines, lambda line: None)
                try:
                    await episode.open()
                except StepFailed:
                    self._note_refusal(server, report)
                    self._over.append(report)
                    return
                except asyncio.CancelledError:
                    self._note_cut(episode)
                    await episode.end()
                    raise
            server.refused = 0
            await self._play_open(server, episode)

    async def _play_open(self, server: _Server, episode: Smoke) -> None:
        self._count_open(server, +1)
        held = True
        try:
            await self._hold()
            await episode.play()
            async with server.slots:
                self._count_open(server, -1)  # the verify releases the server's browser
                held = False
                await episode.score()
        except StepFailed:
            pass  # noted in the report
        except asyncio.CancelledError:
            self._note_cut(episode)
            raise
        finally:
            if held:
                self._count_open(server, -1)
            self._over.append(episode.report)
            await episode.end()

    def _note_refusal(self, server: _Server, report: Report) -> None:
        server.refused = server.refused + 1 if report.kind == FailureKind.ENVIRONMENT_UNREACHABLE else 0

    def _note_cut(self, episode: Smoke) -> None:
        """Note an episode that is broken off: by a signal it is neither healthy nor failed, else it took too long."""
        if self._ended is Ended.DURATION:
            answered = (
                f"not over {self._plan.longest_episode_s:.0f} s after the duration of {self._plan.duration_s:g} s"
            )
            episode.report.fail(episode.current, failure_of(FailureKind.EPISODE_DEADLINE, answered), answered)
        else:
            episode.report.cut_short = True

    async def _hold(self) -> None:
        """Wait until every session is open, or is as far as it will get. Does nothing afterwards."""
        if not self._all_open.is_set():
            self._waiting += 1
            self._see_whether_all_are_open()
            await self._all_open.wait()

    def _see_whether_all_are_open(self) -> None:
        if self._waiting + self._out_of_work == len(self._workers):
            self._all_open.set()

    def _count_open(self, server: _Server, change: int) -> None:
        server.open += change
        self._open += change
        server.peak_open = max(server.peak_open, server.open)
        self._peak_open = max(self._peak_open, self._open)


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[Ended], None]) -> Iterator[None]:
    """Tell `stop` of the first SIGINT or SIGTERM; from then on, and after the block, they take their usual course."""

    def handle(why: Ended) -> None:
        restore()
        stop(why)

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return
    for number, why in _SIGNALS.items():
        loop.add_signal_handler(number, handle, why)
    try:
        yield
    finally:
        restore()
