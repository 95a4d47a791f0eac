"""Who may pass to the environment, over all sessions of a training: caps, outage, counters, reports of rollouts.

Everything here is state and one timer in one event loop; environment_gate.py is what sessions see of it, and
environment_coordinator.py carries it to other processes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rollout_stats import RolloutReport

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0
_LONGEST_RETRY_AFTER_S = 60.0
# Seeds of a run that goes on are at most one rollout's retry backoff apart (60 s); after a longer silence, such as an
# optimiser step, nobody knows whether the outage still lasts.
_OUTAGE_FORGOTTEN_AFTER_S = 90.0
_MOST_REPORTS = 65_536


class SlotKind(StrEnum):
    """What a slot is for. Seeds and verifies share one number of slots."""

    OPEN = "open"  # a session, from before its seed until after its close
    SEED = "seed"
    VERIFY = "verify"


class Pass(StrEnum):
    """The answer to one who waits for a slot."""

    GO = "go"
    LAST_CHANCE = "last_chance"  # the slot is there, but the outage has outlasted its patience: don't come back
    ELSEWHERE = "elsewhere"  # no slot: there is an outage, and the client may go to another environment server
    REFUSED = "refused"  # no slot: the outage has outlasted its patience

    @property
    def has_slot(self) -> bool:
        """Whether the client now holds the slot."""
        return self in (Pass.GO, Pass.LAST_CHANCE)


class SlotEnd(StrEnum):
    """What became of a slot that is given back."""

    NOTHING = "nothing"  # nothing that says anything of the environment
    CLOSED = "closed"  # the session that was open is closed
    SEEDED = "seeded"
    SEED_FAILED = "seed_failed"  # by the environment's fault
    UNREACHABLE = "unreachable"  # the environment refused the connection


@dataclass(frozen=True)
class Ask:
    """A client wants a slot."""

    slot: int
    """The client's own number for it, never used again."""
    kind: SlotKind
    may_leave: bool = False
    """Whether a client that wants a seed would rather be sent elsewhere than wait for the end of an outage."""


@dataclass(frozen=True)
class Ended:
    """A client gives a slot back, or waits for it no more."""

    slot: int
    how: SlotEnd
    retry_after_s: float | None = None
    """How long the environment asked to be left alone."""


GateEvent = Ask | Ended | RolloutReport


@dataclass(frozen=True)
class GateLimits:
    """What all clients of one gate must agree on."""

    max_open_sessions: int
    max_concurrent_seeds: int
    outage_after_seeds: int
    outage_patience_s: float
    server: str | None = None
    """Address of the server, for messages."""

    @classmethod
    def of(cls, settings: RecipeSettings) -> GateLimits:
        """Return the limits that the settings give."""
        return cls(
            settings.max_open_sessions,
            settings.max_concurrent_seeds,
            settings.outage_after_seeds,
            settings.outage_patience_s,
            settings.environment_url,
        )


@dataclass(frozen=True)
class GateCounters:
    """What the gate has counted over all agent-loop workers."""

    opened: int
    """Sessions that were opened: seeds that were answered."""
    closed: int
    """Of these, sessions known to be closed; `opened - closed` beyond `open_now` may have leaked."""
    open_now: int
    """Sessions that hold an open slot."""
    down_s: float
    """Seconds for which the gate has been closed; 0.0 when it is open. Time in which nobody asked does not count."""
    down_servers: tuple[str, ...] = ()
    """Addresses of the servers whose gate is closed; of one gate, its server's or none."""


def backoff_s(attempt: int) -> float:
    """Return how long to wait before trial number `attempt` (from 0): doubling, capped, with jitter."""
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempt, 30)) * random.uniform(0.5, 1.0)


class ReportBook:
    """Reports of rollouts until the driver takes them; locked, since without Ray the driver is another thread."""

    def __init__(self, most: int = _MOST_REPORTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._count = 0
        self._by_uid: dict[str, dict[int, RolloutReport]] = {}

    def add(self, report: RolloutReport) -> None:
        """Keep a report, once if it comes twice; beyond the limit, the group that came first is dropped."""
        with self._lock:
            group = self._by_uid.setdefault(report.uid, {})
            self._count += report.rollout not in group
            group[report.rollout] = report
            while self._count > self._most:
                self._count -= len(self._by_uid.pop(next(iter(self._by_uid))))

    def take(self, uids: Iterable[str]) -> list[RolloutReport]:
        """Return the reports of these groups and forget them."""
        with self._lock:
            taken = [report for uid in uids for report in self._by_uid.pop(uid, {}).values()]
            self._count -= len(taken)
            return taken


class Outage:
    """Whether seeds may pass. One is let through at a time while the gate is closed; its success opens the gate."""

    def __init__(self, limits: GateLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._failed_in_a_row = 0
        self._trials = 0
        self._last_news = 0.0
        self.since: float | None = None
        """When the gate was closed; None while it is open."""
        self.next_trial_at = 0.0
        self.spent = False
        """Whether the outage has outlasted its patience."""

    def down_s(self, seeds_about: bool) -> float:
        """Return for how long the gate has been closed, up to the last news if no seed waits or is under way."""
        if self.since is None:
            return 0.0
        return (self._clock() if seeds_about else self._last_news) - self.since

    @property
    def patience_ends_at(self) -> float:
        """When waiting seeds give up."""
        return self.since + self._limits.outage_patience_s

    def asked(self, seeds_about: bool) -> None:
        """Note that a seed wants to pass. After a long silence the outage counts as a new one."""
        now = self._clock()
        forgotten_at = max(self._last_news + _OUTAGE_FORGOTTEN_AFTER_S, self.next_trial_at)
        if self.since is not None and not seeds_about and now > forgotten_at:
            self.since, self.next_trial_at, self.spent, self._trials = now, now, False, 0
        self._last_news = now

    def succeeded(self) -> None:
        """Note a seed that was answered: the gate opens."""
        if self.since is not None:
            down_s = self._clock() - self.since
            logger.warning("The environment at %s answers seeds again after %.0f s", self._limits.server, down_s)
        self._failed_in_a_row, self.since, self.spent = 0, None, False
        self._last_news = self._clock()

    def failed(self, refused: bool, trial_took_s: float | None, retry_after_s: float | None) -> None:
        """Note a seed that the environment spoiled; `trial_took_s` is None for one that was no trial."""
        now = self._last_news = self._clock()
        delay_s = min(retry_after_s or 0.0, _LONGEST_RETRY_AFTER_S)
        if self.since is None:
            self._failed_in_a_row += 1
            if not refused and self._failed_in_a_row < self._limits.outage_after_seeds:
                return
            what = "refuses connections" if refused else f"spoiled {self._failed_in_a_row} seeds in a row"
            message = "The environment at %s %s: no seed passes but one at a time, to try it"
            logger.warning(message, self._limits.server, what)
            self.since, self.spent, self._trials = now, False, 0
            self.next_trial_at = now + max(backoff_s(0), delay_s)
            return
        if trial_took_s is not None:
            self._trials += 1
            # Beyond patience each seed is a trial at once, unless trials take long: 512 rollouts that each wait out
            # a seed's timeout would keep the trainer waiting for hours.
            delay_s = max(delay_s, trial_took_s if self.spent else backoff_s(self._trials))
        self.next_trial_at = max(self.next_trial_at, now + delay_s)


Key = tuple[str, int]  # client, its slot
Passed = Callable[[int, Pass], None]


class GateCore:
    """Who may pass, over all clients: two caps, the outage, counters and reports. Runs in one event loop.

    Open sessions cost memory (160 to 520 MiB each), seeds and verifies cost CPU: about 2 active sessions saturate
    2 cores, more only add latency. A session takes one open slot for its whole life, and one seed slot while its
    seed or its verify is under way. First come, first served, but a verify before any seed: it ends a session.
    """

    def __init__(self, limits: GateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.reports = ReportBook()
        self._clock = clock
        self._outage = Outage(limits, clock)
        self._clients: dict[str, Passed] = {}
        self._waiting: dict[SlotKind, dict[Key, Ask]] = {kind: {} for kind in SlotKind}
        self._held: dict[Key, tuple[SlotKind, float]] = {}
        """Kind of each slot that is taken, and since when."""
        self._used: Counter[SlotKind] = Counter()
        self._trials: set[Key] = set()
        self._opened = 0
        self._closed = 0
        self._held_back_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(
        self,
        client: str,
        passed: Passed,
        waiting: Iterable[Ask] = (),
        held: Iterable[Ask] = (),
        replaces: str = "",
    ) -> None:
        """Take in a client with all that it waits for and holds; `replaces` is the name that it had before."""
        trials = {slot for name, slot in self._trials if name == replaces}
        self._forget(replaces)
        self._clients[client] = passed
        for ask in held:
            self._hold((client, ask.slot), ask.kind)
            if ask.slot in trials:
                self._trials.add((client, ask.slot))
        for ask in waiting:
            self.handle(client, ask)
        self.tick()

    def drop(self, client: str) -> int:
        """Free all that a client holds and waits for, and forget it; return how many slots it held."""
        freed = self._forget(client)
        self.tick()
        return freed

    def hold_back(self, seconds: float) -> None:
        """Let nobody through for so long."""
        self._held_back_until = self._clock() + seconds

    def handle(self, client: str, event: GateEvent) -> None:
        """Take in what a client says. A slot that is not known any more still says how it ended."""
        match event:
            case RolloutReport():
                self.reports.add(event)
            case Ask():
                if event.kind is SlotKind.SEED:
                    self._outage.asked(self._seeds_about())
                self._waiting[event.kind][client, event.slot] = event
                self.tick()
            case Ended():
                self._end((client, event.slot), event)
                self.tick()

    def counters(self) -> GateCounters:
        """Return what was counted so far."""
        down_s = self._outage.down_s(self._seeds_about())
        # `down_s` says less: it is 0 if nobody has asked since the seed that closed the gate.
        down = (self.limits.server,) if self._outage.since is not None and self.limits.server else ()
        return GateCounters(self._opened, self._closed, self._used[SlotKind.OPEN], down_s, down)

    def tick(self) -> None:
        """Let through whoever may pass now, and come back when time alone changes that."""
        now, outage = self._clock(), self._outage
        if now < self._held_back_until:
            self._call_later(self._held_back_until - now)
            return
        while self._waiting[SlotKind.OPEN] and self._used[SlotKind.OPEN] < self.limits.max_open_sessions:
            self._let_through(SlotKind.OPEN, Pass.GO)
        if outage.since is not None and not outage.spent and now >= outage.patience_ends_at:
            outage.spent = True
            self._turn_away_seeds(Pass.REFUSED)
        elif outage.spent and now < outage.next_trial_at:
            self._turn_away_seeds(Pass.REFUSED)
        while self._used[SlotKind.SEED] + self._used[SlotKind.VERIFY] < self.limits.max_concurrent_seeds:
            if self._waiting[SlotKind.VERIFY]:
                self._let_through(SlotKind.VERIFY, Pass.GO)
            elif self._waiting[SlotKind.SEED] and self._seed_may_pass(now):
                self._let_through(SlotKind.SEED, Pass.LAST_CHANCE if outage.spent else Pass.GO)
            else:
                break
        if outage.since is not None and not outage.spent:  # after the trial, for which they are as good as any
            self._turn_away_seeds(Pass.ELSEWHERE)
        self._set_timer(now)

    def _seed_may_pass(self, now: float) -> bool:
        outage = self._outage
        return outage.since is None or outage.spent or (not self._trials and now >= outage.next_trial_at)

    def _seeds_about(self) -> bool:
        return bool(self._waiting[SlotKind.SEED] or self._used[SlotKind.SEED])

    def _let_through(self, kind: SlotKind, answer: Pass) -> None:
        key = next(iter(self._waiting[kind]))
        del self._waiting[kind][key]
        self._hold(key, kind)
        if kind is SlotKind.SEED and self._outage.since is not None:
            self._trials.add(key)
        self._clients[key[0]](key[1], answer)

    def _turn_away_seeds(self, answer: Pass) -> None:
        waiting = self._waiting[SlotKind.SEED]
        for key in [key for key, ask in waiting.items() if answer is Pass.REFUSED or ask.may_leave]:
            del waiting[key]
            self._clients[key[0]](key[1], answer)

    def _hold(self, key: Key, kind: SlotKind) -> None:
        self._held[key] = kind, self._clock()
        self._used[kind] += 1

    def _end(self, key: Key, event: Ended) -> None:
        for waiting in self._waiting.values():
            waiting.pop(key, None)
        kind, since = self._held.pop(key, (None, 0.0))
        if kind is not None:
            self._used[kind] -= 1
        trial = key in self._trials
        self._trials.discard(key)
        match event.how:
            case SlotEnd.CLOSED:
                self._closed += 1
            case SlotEnd.SEEDED:
                self._opened += 1
                self._outage.succeeded()
            case SlotEnd.SEED_FAILED | SlotEnd.UNREACHABLE:
                refused = event.how is SlotEnd.UNREACHABLE
                took_s = self._clock() - since if trial else None
                self._outage.failed(refused, took_s, event.retry_after_s)
                if trial and self._outage.spent:
                    self._turn_away_seeds(Pass.REFUSED)

    def _forget(self, client: str) -> int:
        self._clients.pop(client, None)
        for waiting in self._waiting.values():
            for key in [key for key in waiting if key[0] == client]:
                del waiting[key]
        held = [key for key in self._held if key[0] == client]
        for key in held:
            self._used[self._held.pop(key)[0]] -= 1
            self._trials.discard(key)
        return len(held)

    def _set_timer(self, now: float) -> None:
        outage = self._outage
        if outage.since is None or outage.spent or not self._waiting[SlotKind.SEED]:
            self._call_later(None)
            return
        due = outage.patience_ends_at if self._trials else min(outage.patience_ends_at, outage.next_trial_at)
        # A trial that is due but finds no free slot is let through when a slot is given back.
        self._call_later(due - now if due > now else outage.patience_ends_at - now)

    def _call_later(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None else asyncio.get_running_loop().call_later(delay_s, self.tick)
