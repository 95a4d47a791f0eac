"""The gate in front of the environment: how many sessions may be open, and what happens while the server is down."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0


def backoff_s(attempt: int) -> float:
    """Return how long to wait before probe number `attempt` (from 0): doubling, capped, with jitter."""
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempt, 30)) * random.uniform(0.5, 1.0)


class EnvironmentGate:
    """Caps of one process and event loop, and the one probe behind which all of its sessions wait out an outage.

    Open sessions cost memory (160 to 520 MiB each), seeds and verifies cost CPU: about 2 active sessions saturate
    2 cores, more only add latency. A session takes one open slot for its whole life, and one seed slot while its
    seed or its verify is under way.
    """

    def __init__(self, settings: RecipeSettings) -> None:
        self._settings = settings
        self._open_slots = asyncio.Semaphore(settings.max_open_sessions)
        self._seed_slots = asyncio.Semaphore(settings.max_concurrent_seeds)
        self._down_since: float | None = None
        self._probing: asyncio.Task[bool] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @classmethod
    def shared(cls, settings: RecipeSettings) -> EnvironmentGate:
        """Return the gate of the running event loop; the same one for equal settings."""
        gates = _GATES.setdefault(asyncio.get_running_loop(), {})
        if settings not in gates:
            gates[settings] = cls(settings)
        return gates[settings]

    @property
    def down(self) -> bool:
        """Whether the server refused a connection and has not answered since."""
        return self._down_since is not None

    async def take_open_slot(self) -> None:
        """Wait until one more session may be open."""
        await self._open_slots.acquire()

    def free_open_slot(self) -> None:
        """Give back the slot of a session that is closed."""
        self._open_slots.release()

    async def take_seed_slot(self) -> None:
        """Wait until one more seed or verify may be under way."""
        await self._seed_slots.acquire()

    def free_seed_slot(self) -> None:
        """Give back the slot of a seed or verify that has ended."""
        self._seed_slots.release()

    def keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Return a task for work that must outlive its caller; asyncio itself holds tasks only weakly."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drain(self, timeout_s: float) -> int:
        """Wait until nothing runs in the background any more; return how many tasks were still running at the end.

        For programs that end their event loop: a seed or a close that is cut off leaks its browser.
        """
        if self._background:
            await asyncio.wait(set(self._background), timeout=timeout_s)
        return len(self._background)

    def note_down(self) -> None:
        """Note that the server refused a connection."""
        if self._down_since is None:
            logger.warning("The environment at %s refuses connections; waiting for it", self._settings.environment_url)
            self._down_since = time.monotonic()

    def note_up(self) -> None:
        """Note that the server answered."""
        if self._down_since is not None:
            down_s = time.monotonic() - self._down_since
            logger.warning("The environment at %s answers again after %.0f s", self._settings.environment_url, down_s)
        self._down_since = None

    async def wait_until_up(self) -> bool:
        """Return True once the server answers; False when it has been down for longer than outage_patience_s.

        All waiting sessions share one probe. Once the patience is spent, each call probes once, at once: a run that
        goes on notices a server that comes back late, but waits for it no more.
        """
        if self._down_since is None:
            return True
        if self._probing is None or self._probing.done():
            self._probing = self.keep(self._probe_until_up(self._down_since))
        return await asyncio.shield(self._probing)

    async def _probe_until_up(self, down_since: float) -> bool:
        gives_up_at = down_since + self._settings.outage_patience_s
        attempt = 0
        while True:
            remaining_s = gives_up_at - time.monotonic()
            if remaining_s > 0:
                await asyncio.sleep(min(backoff_s(attempt), remaining_s))
            if await self._answers():
                self.note_up()
                return True
            if remaining_s <= 0:
                return False
            attempt += 1

    async def _answers(self) -> bool:
        """Whether anything answers HTTP at the environment's address. /close_session without a cookie opens nothing."""
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                url = f"{self._settings.require_environment_url()}/close_session"
                async with http.post(url, json={}, allow_redirects=False):
                    return True
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("Probe of the environment failed: %r", error)
            return False


_GATES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RecipeSettings, EnvironmentGate]] = (
    weakref.WeakKeyDictionary()
)
