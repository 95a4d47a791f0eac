"""The gate in front of an environment server, as the sessions of one event loop see it.

One gate stands before all agent-loop workers of a training, because they share the server: who may pass is decided by
one GateCore, which lives in an actor where Ray runs (environment_coordinator.py) and in this process where it does not.
Each of several servers has a gate of its own, with its share of the caps (RecipeSettings.servers).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from gate_core import Ask, Ended, GateCore, GateCounters, GateLimits, Pass, Passed, SlotEnd, SlotKind
from rollout_failures import Failure, FailureKind, Fault
from rollout_stats import RolloutReport

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

__all__ = ["CoordinatorError", "EnvironmentGate", "GateCore", "GateCounters", "GateLimits", "Pass"]

logger = logging.getLogger(__name__)


class CoordinatorError(RuntimeError):
    """The coordinator of all agent-loop workers cannot be reached."""


class Link(Protocol):
    """How a gate reaches the core."""

    def connect(self, passed: Passed, lost: Callable[[Exception], None]) -> None:
        """Set what is called with each answer, and when there will be none."""

    def send(self, event: Ask | Ended) -> None:
        """Pass an event on, in order."""

    async def deliver(self, report: RolloutReport | None) -> None:
        """Return once the core has this report and every event before it. Raises CoordinatorError."""


class LocalLink:
    """The core in this process."""

    def __init__(self, core: GateCore) -> None:
        self._core = core

    def connect(self, passed: Passed, lost: Callable[[Exception], None]) -> None:
        """Join the core as its only client."""
        self._core.join("local", passed)

    def send(self, event: Ask | Ended) -> None:
        """Pass an event on, at once."""
        self._core.handle("local", event)

    async def deliver(self, report: RolloutReport | None) -> None:
        """Return once the core has the report."""
        if report is not None:
            self._core.handle("local", report)


class EnvironmentGate:
    """What the sessions of one event loop pass through; the caps behind it hold over all agent-loop workers."""

    def __init__(self, settings: RecipeSettings, link: Link | None = None) -> None:
        self._link = LocalLink(GateCore(GateLimits.of(settings))) if link is None else link
        self._numbers = itertools.count(1)
        self._passes: dict[int, asyncio.Future[Pass]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._link.connect(self._passed, self._lost)

    @classmethod
    def shared(cls, settings: RecipeSettings) -> EnvironmentGate:
        """Return the gate of the running event loop; the same one for equal settings."""
        gates = _GATES.setdefault(asyncio.get_running_loop(), {})
        if settings not in gates:
            gates[settings] = cls(settings, _shared_link(settings))
        return gates[settings]

    async def take_open_slot(self) -> int:
        """Return the slot once one more session may be open. Raises CoordinatorError, as all that wait here do."""
        return (await self._take(SlotKind.OPEN))[0]

    def free_open_slot(self, slot: int, closed: bool) -> None:
        """Give back the slot of a session that has ended; `closed` if it was open and is known to be closed."""
        self._link.send(Ended(slot, SlotEnd.CLOSED if closed else SlotEnd.NOTHING))

    async def take_seed_slot(self, may_leave: bool = False) -> tuple[int, Pass]:
        """Return a slot once one more seed may be under way and the gate is open; or the refusal, without a slot.

        With `may_leave` an outage is not waited for: the answer is ELSEWHERE.
        """
        return await self._take(SlotKind.SEED, may_leave)

    def free_seed_slot(self, slot: int) -> None:
        """Give back the slot of a seed that came to no end."""
        self._link.send(Ended(slot, SlotEnd.NOTHING))

    def note_seed(self, slot: int, failure: Failure | None) -> None:
        """Give back the slot of a seed that has ended, with what it says of the environment."""
        if failure is None:
            self._link.send(Ended(slot, SlotEnd.SEEDED))
        elif failure.kind is FailureKind.ENVIRONMENT_UNREACHABLE:
            self._link.send(Ended(slot, SlotEnd.UNREACHABLE, failure.retry_after_s))
        elif failure.fault is Fault.ENVIRONMENT:
            self._link.send(Ended(slot, SlotEnd.SEED_FAILED, failure.retry_after_s))
        else:
            self.free_seed_slot(slot)

    async def take_verify_slot(self) -> int:
        """Return the slot once one more verify may be under way; an outage does not hold it back."""
        return (await self._take(SlotKind.VERIFY))[0]

    def free_verify_slot(self, slot: int) -> None:
        """Give back the slot of a verify that has ended."""
        self._link.send(Ended(slot, SlotEnd.NOTHING))

    async def report(self, report: RolloutReport) -> None:
        """Return once the driver can take the report; a report that can't be delivered is lost with a warning."""
        try:
            await self._link.deliver(report)
        except CoordinatorError as error:
            logger.warning("The report of rollout %s_%d is lost: %s", report.uid, report.rollout, error)

    def keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Return a task for work that must outlive its caller; asyncio itself holds tasks only weakly."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drain(self, timeout_s: float) -> int:
        """Wait until nothing runs in the background any more; return how many tasks were still running at the end.

        For programs that end their event loop: a seed or a close that is cut off leaks its browser, a slot that is
        not given back is missing to the other workers for a minute.
        """
        started = time.monotonic()
        if self._background:
            await asyncio.wait(set(self._background), timeout=timeout_s)
        try:
            await asyncio.wait_for(self._link.deliver(None), max(0.1, started + timeout_s - time.monotonic()))
        except (CoordinatorError, TimeoutError) as error:
            logger.warning("The coordinator was not told of the slots given back last: %r", error)
        return len(self._background)

    async def _take(self, kind: SlotKind, may_leave: bool = False) -> tuple[int, Pass]:
        slot = next(self._numbers)
        passed = self._passes[slot] = asyncio.get_running_loop().create_future()
        self._link.send(Ask(slot, kind, may_leave))
        try:
            return slot, await passed
        except asyncio.CancelledError:
            # Whether it still waits or has just been let through, in this very moment or behind an actor.
            self._link.send(Ended(slot, SlotEnd.NOTHING))
            raise
        finally:
            del self._passes[slot]

    def _passed(self, slot: int, answer: Pass) -> None:
        passed = self._passes.get(slot)
        if passed is not None and not passed.done():
            passed.set_result(answer)

    def _lost(self, error: Exception) -> None:
        for passed in self._passes.values():
            if not passed.done():
                passed.set_exception(error)


_GATES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RecipeSettings, EnvironmentGate]] = (
    weakref.WeakKeyDictionary()
)
_SHARED_CORES: dict[RecipeSettings, list[GateCore]] = {}


def ray_runs() -> bool:
    """Return whether this process belongs to a Ray cluster; does not import Ray to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def shared_cores(settings: RecipeSettings) -> list[GateCore]:
    """Return the cores behind the shared gates of this process, of event loops that have ended as well."""
    return _SHARED_CORES.setdefault(settings, [])


def _shared_link(settings: RecipeSettings) -> Link:
    if ray_runs():
        from environment_coordinator import RayLink  # here, so that the gate works without Ray

        return RayLink(settings)
    core = GateCore(GateLimits.of(settings))
    shared_cores(settings).append(core)
    return LocalLink(core)
