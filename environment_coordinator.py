"""One gate for the agent-loop workers of a training: the GateCore in a Ray actor, and the two ways to reach it.

Each environment server has an actor of its own.

Workers reach it through RayLink. A rollout's calls and the answers to them go in batches, so thousands of waiting
rollouts are two calls per worker, and nothing is called per turn. The actor starts empty: when it was lost, each worker
tells the new one what it holds. A worker that was not heard of for SILENT_AFTER_S has lost its slots. Hearing is
preferred to Ray's own news of an actor's death because it works for every process that rolls out, survives the
coordinator, and mends itself: a worker that was only stuck joins again with what it holds.

The driver reaches it through `coordinator_for_driver`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from environment_gate import CoordinatorError, GateCounters, ray_runs, shared_cores
from gate_core import Ask, Ended, GateCore, GateEvent, GateLimits, Pass, Passed, backoff_s
from recipe_settings import SettingsError
from rollout_stats import RolloutReport

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

logger = logging.getLogger(__name__)

# An event loop that tokenises or unpickles may be stuck for many seconds; a slot of a dead worker can wait a minute.
SILENT_AFTER_S = 60.0
POLL_S = 10.0
"""How long the actor holds a call that waits for news; at least so often each worker that holds a slot is heard of."""
CALL_TIMEOUT_S = 30.0
"""Longest time for a call to be answered; the first one waits for the actor's process to start."""
GIVE_UP_AFTER_S = 120.0
"""How long a worker tries to reach the coordinator before all that wait for it fail."""
SETTLE_S = 5.0
"""How long a new coordinator lets nobody through: if it follows a lost one, the workers tell it first what they hold.

It cannot know whether it is the first: a worker that never met the lost one may be the first to come.
"""
DRIVER_TIMEOUT_S = 60.0
# Two calls of each worker are under way at once, one that waits and one that tells.
_MAX_CONCURRENCY = 10_000


@dataclass
class _Mailbox:
    """Answers to one client that it has not fetched yet."""

    heard_at: float
    passes: list[tuple[int, Pass]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, slot: int, answer: Pass) -> None:
        self.passes.append((slot, answer))
        self.arrived.set()


class Coordinator:
    """The actor: a GateCore, and a mailbox per client. Async throughout, so no call waits for another."""

    def __init__(self, limits: GateLimits, silent_after_s: float, poll_s: float, settle_s: float) -> None:
        self._core = GateCore(limits)
        self._core.hold_back(settle_s)
        self._silent_after_s = silent_after_s
        self._poll_s = poll_s
        self._mail: dict[str, _Mailbox] = {}

    async def join(self, client: str, limits: GateLimits, waiting: list[Ask], held: list[Ask], replaces: str) -> str:
        """Take in a client with all that it waits for and holds; return why not, or an empty text."""
        if limits != self._core.limits:
            return f"the coordinator was started with {self._core.limits}, this process has {limits}"
        self._leave(replaces)
        mailbox = self._mail[client] = _Mailbox(time.monotonic())
        self._core.join(client, mailbox.put, waiting, held, replaces)
        return ""

    async def push(self, client: str, events: list[GateEvent]) -> bool:
        """Take in what a client says; return False to a client that is not known and must join first."""
        mailbox = self._mail.get(client)
        if mailbox is None:
            return False
        mailbox.heard_at = time.monotonic()
        for event in events:
            self._core.handle(client, event)
        return True

    async def pull(self, client: str) -> list[tuple[int, Pass]] | None:
        """Return the answers to a client once there are some, or none after a while; None if it is not known."""
        self._drop_silent()
        mailbox = self._mail.get(client)
        if mailbox is None:
            return None
        mailbox.heard_at = time.monotonic()
        if not mailbox.passes:
            try:
                await asyncio.wait_for(mailbox.arrived.wait(), self._poll_s)
            except TimeoutError:
                pass  # no news; the answer shows the client that the coordinator lives
        mailbox.arrived.clear()
        passes, mailbox.passes = mailbox.passes, []
        return passes if self._mail.get(client) is mailbox else None

    async def take_reports(self, uids: set[str]) -> list[RolloutReport]:
        """Return the reports of these groups and forget them."""
        return self._core.reports.take(uids)

    async def counters(self) -> GateCounters:
        """Return what was counted so far."""
        self._drop_silent()
        return self._core.counters()

    def _leave(self, client: str) -> None:
        mailbox = self._mail.pop(client, None)
        if mailbox is not None:
            mailbox.arrived.set()  # a call that still waits for news of it ends

    def _drop_silent(self) -> None:
        silent_since = time.monotonic() - self._silent_after_s
        for client in [name for name, mailbox in self._mail.items() if mailbox.heard_at < silent_since]:
            self._leave(client)
            freed = self._core.drop(client)
            if freed:
                logger.warning("A worker was silent for %.0f s: its %d slots are free", self._silent_after_s, freed)


_STARTED: list[Any] = []
"""Handles of the actors that this process started. Ray ends an actor once its starter's own handle is gone."""


def find_or_start(
    settings: RecipeSettings,
    silent_after_s: float = SILENT_AFTER_S,
    poll_s: float = POLL_S,
    settle_s: float = SETTLE_S,
) -> ray.actor.ActorHandle:
    """Return the coordinator of this job and this server, started if there is none.

    It ends with the process that started it, and the next one to need it starts another. Raises CoordinatorError when
    Ray does not run, where Ray itself would start a cluster of its own.
    """
    if not ray_runs():
        raise CoordinatorError("Ray does not run in this process any more")
    name = f"environment_gate_{hashlib.sha256(str(settings.environment_url).encode()).hexdigest()[:16]}"
    try:
        return ray.get_actor(name)
    except ValueError:  # there is none
        actor_class = ray.remote(Coordinator).options(
            name=name, get_if_exists=True, num_cpus=0, max_concurrency=_MAX_CONCURRENCY
        )
        _STARTED.append(actor_class.remote(GateLimits.of(settings), silent_after_s, poll_s, settle_s))
        return _STARTED[-1]


class _NotKnown(Exception):
    """The coordinator does not know this client: it was taken for dead."""


class RayLink:
    """The core in the actor, as one client. Calls are made only while something is held, waited for or unsent."""

    def __init__(self, settings: RecipeSettings) -> None:
        self._settings = settings
        self._actor: Any = None
        self._client = ""
        self._waiting: dict[int, Ask] = {}
        self._held: dict[int, Ask] = {}
        self._unsent: list[GateEvent] = []
        self._delivered: list[asyncio.Future[None]] = []
        """Whom to tell when all that is unsent now has arrived."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._answered_at = 0.0
        self._failed_calls = 0

    def connect(self, passed: Passed, lost: Callable[[Exception], None]) -> None:
        """Set what is called with each answer, and when there will be none."""
        self._passed, self._lost = passed, lost

    def send(self, event: Ask | Ended) -> None:
        """Pass an event on, in order, with the next call."""
        if isinstance(event, Ask):
            self._waiting[event.slot] = event
        else:
            self._waiting.pop(event.slot, None)
            self._held.pop(event.slot, None)
        self._unsent.append(event)
        self._wake()

    async def deliver(self, report: RolloutReport | None) -> None:
        """Return once the actor has this report and every event before it. Raises CoordinatorError."""
        if report is not None:
            self._unsent.append(report)
        elif not self._unsent:
            return
        delivered = asyncio.get_running_loop().create_future()
        self._delivered.append(delivered)
        self._wake()
        await delivered

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._held or self._unsent or self._delivered)

    def _wake(self) -> None:
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Exchange events and answers for as long as there are any; at the end nobody is left waiting."""
        self._answered_at = time.monotonic()
        try:
            while self._busy:
                try:
                    await self._join()
                    await self._exchange()
                except RayTaskError as error:  # the coordinator answers, but fails: the same call would fail again
                    raise CoordinatorError(f"The environment gate's coordinator failed: {error}") from error
                except (RayError, TimeoutError, _NotKnown) as error:
                    self._actor = None
                    if time.monotonic() - self._answered_at > GIVE_UP_AFTER_S:
                        raise CoordinatorError(
                            f"No answer from the environment gate's coordinator for {GIVE_UP_AFTER_S:g} s ({error!r}). "
                            "Look for the actor `Coordinator` in `ray list actors` and at the Ray cluster's health"
                        ) from error
                    logger.warning("No contact with the environment gate's coordinator, trying again: %r", error)
                    await asyncio.sleep(backoff_s(self._failed_calls))
                    self._failed_calls += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, rollouts must not wait for ever behind it
            known = isinstance(error, SettingsError | CoordinatorError)
            self._fail_all(error if known else CoordinatorError(repr(error)))

    def _fail_all(self, error: Exception) -> None:
        """Leave nobody waiting. What is held stays held, for the next coordinator to know."""
        self._waiting.clear()
        self._unsent.clear()
        delivered, self._delivered = self._delivered, []
        for future in delivered:
            if not future.done():
                future.set_exception(error if isinstance(error, CoordinatorError) else CoordinatorError(str(error)))
        self._lost(error)

    async def _join(self) -> None:
        if self._actor is None:
            # In a thread: to name an actor takes an answer from the cluster's head.
            start = asyncio.to_thread(find_or_start, self._settings)
            self._actor = await asyncio.wait_for(start, CALL_TIMEOUT_S)
        # A new name each time: what is still under way under the old one can't take answers meant for the new one.
        replaces, self._client = self._client, uuid.uuid4().hex
        waiting, held = list(self._waiting.values()), list(self._held.values())
        self._unsent = [event for event in self._unsent if not isinstance(event, Ask)]
        limits = GateLimits.of(self._settings)
        problem = await self._answer(self._actor.join.remote(self._client, limits, waiting, held, replaces))
        if problem:
            raise SettingsError(
                f"Two processes of one training have different NEMO_GYM_BROWSER_* settings: {problem}. Fix: export the "
                "same settings on all nodes before Ray starts there"
            )

    async def _exchange(self) -> None:
        """Tell the actor what there is to tell and pass its answers on, until nothing is held, waited for or unsent."""
        pull = self._pull()
        try:
            while self._busy:
                if self._unsent or self._delivered:
                    await self._push()
                if pull.done():
                    self._take(pull.result())
                    pull = self._pull()
                elif not self._unsent and not self._delivered:
                    self._changed.clear()
                    changed = asyncio.ensure_future(self._changed.wait())
                    await asyncio.wait({pull, changed}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
        finally:
            pull.cancel()

    def _pull(self) -> asyncio.Task[list[tuple[int, Pass]] | None]:
        task = asyncio.ensure_future(self._answer(self._actor.pull.remote(self._client), held_s=POLL_S))
        # Fetched so that asyncio does not complain of a failure after which the exchange ended for another reason.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _take(self, passes: list[tuple[int, Pass]] | None) -> None:
        if passes is None:
            raise _NotKnown
        for slot, answer in passes:
            ask = self._waiting.pop(slot, None)
            if ask is None:
                continue  # given up meanwhile; the actor hears of it with the next call
            if answer.has_slot:
                self._held[slot] = ask
            self._passed(slot, answer)

    async def _push(self) -> None:
        events, delivered = self._unsent, self._delivered
        self._unsent, self._delivered = [], []
        try:
            if not await self._answer(self._actor.push.remote(self._client, events)):
                raise _NotKnown
        except BaseException:  # a push that is cancelled must not lose what it carried either
            self._unsent, self._delivered = events + self._unsent, delivered + self._delivered
            raise
        for future in delivered:
            if not future.done():
                future.set_result(None)

    async def _answer(self, call: Awaitable[Any], held_s: float = 0.0) -> Any:
        """Return the answer to a call that the actor holds back for at most `held_s`. Raises TimeoutError."""
        answer = await asyncio.wait_for(call, held_s + CALL_TIMEOUT_S)
        self._answered_at, self._failed_calls = time.monotonic(), 0
        return answer


class DriverCoordinator:
    """The coordinators of all servers as the trainer's process sees them: synchronous, each call with a deadline."""

    def __init__(self, settings: RecipeSettings) -> None:
        self._servers = settings.servers()

    def take_reports(self, uids: Iterable[str]) -> list[RolloutReport]:
        """Return the reports of these groups, each from the server that it was sent through, and forget them.

        Raises CoordinatorError.
        """
        uids = set(uids)
        if ray_runs():
            return [report for server in self._servers for report in self._ask(server, "take_reports", uids)]
        cores = [core for server in self._servers for core in shared_cores(server)]
        return [report for core in cores for report in core.reports.take(uids)]

    def counters(self) -> GateCounters:
        """Return what was counted over all agent-loop workers and all servers. Raises CoordinatorError.

        The environment is down for as long as all servers are: rollouts go on with those that are left.
        """
        counted = [self._counters_of(server) for server in self._servers]
        return _summed(counted, min(counters.down_s for counters in counted))

    def _counters_of(self, server: RecipeSettings) -> GateCounters:
        if ray_runs():
            return self._ask(server, "counters")
        counted = [core.counters() for core in shared_cores(server)]
        return _summed(counted, max((counters.down_s for counters in counted), default=0.0))

    def _ask(self, server: RecipeSettings, method: str, *arguments: Any) -> Any:
        gives_up_at = time.monotonic() + DRIVER_TIMEOUT_S
        attempt = 0
        while True:
            try:
                actor = find_or_start(server)
                left_s = max(1.0, gives_up_at - time.monotonic())
                return ray.get(getattr(actor, method).remote(*arguments), timeout=left_s)
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > gives_up_at:
                    raise CoordinatorError(
                        f"No answer from the environment gate's coordinator to `{method}` within {DRIVER_TIMEOUT_S:g} s"
                    ) from error
                logger.warning("The environment gate's coordinator and its reports are lost, looking anew: %r", error)
                time.sleep(backoff_s(attempt))
                attempt += 1


def _summed(counted: Collection[GateCounters], down_s: float) -> GateCounters:
    """Return the sums of what was counted, with how long the environment has been down."""
    opened, closed, open_now = (
        sum(getattr(counters, name) for counters in counted) for name in ("opened", "closed", "open_now")
    )
    # Each server once: without Ray it has a gate in each event loop.
    down_servers = dict.fromkeys(url for counters in counted for url in counters.down_servers)
    return GateCounters(opened, closed, open_now, down_s, tuple(down_servers))


def coordinator_for_driver(settings: RecipeSettings) -> DriverCoordinator:
    """Return the driver's side of the gates: over all workers where Ray runs, else over this process's shared gates."""
    return DriverCoordinator(settings)
