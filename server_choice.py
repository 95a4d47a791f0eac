"""Which of several environment servers an attempt at a rollout goes to.

An attempt stays at its server from its seed to its close: the server knows its session by a cookie. A server that is
down turns rollouts away before their seed, which costs them nothing but the way to another server: only when all
servers have turned a rollout away for longer than the outage patience does it end as `environment_down`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from environment_gate import EnvironmentGate, Pass
from gate_core import backoff_s

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

# A server that turned a rollout away is left alone by this event loop for so long. Asking sooner finds it no sooner:
# its gate tries one seed in 15 s at the most (gate_core.py), and forgets the outage only if nobody asks for 90 s.
DOWN_FOR_S = 30.0


@dataclass(eq=False)
class Server:
    """One environment server, as the rollouts of one event loop see it. Raises SettingsError when no address is set."""

    settings: RecipeSettings
    """Its address and its share of the caps."""
    gate: EnvironmentGate
    attempts: int = 0
    """Attempts of this event loop that wait for a session there or have one."""
    down_until: float = 0.0
    """When it may be asked again; in the past unless it turned a rollout away."""

    def __post_init__(self) -> None:
        self.url = self.settings.require_environment_url()

    def answered(self) -> None:
        """Note that it answered a seed."""
        self.down_until = 0.0

    def turned_away(self) -> None:
        """Note that it is down."""
        self.down_until = time.monotonic() + DOWN_FOR_S


class ServerChoice:
    """The environment's servers in one event loop."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)

    @classmethod
    def shared(cls, settings: RecipeSettings) -> ServerChoice:
        """Return the servers of the running event loop; the same object for equal settings."""
        choices = _CHOICES.setdefault(asyncio.get_running_loop(), {})
        if settings not in choices:
            choices[settings] = cls([Server(share, EnvironmentGate.shared(share)) for share in settings.servers()])
        return choices[settings]

    def for_rollout(self, uid: str, rollout: int) -> RolloutServers:
        """Return the choice for the attempts at one rollout."""
        return RolloutServers(self.servers, f"{uid}/{rollout}")


_CHOICES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RecipeSettings, ServerChoice]] = (
    weakref.WeakKeyDictionary()
)


class RolloutServers:
    """The choice of a server for each attempt at one rollout."""

    def __init__(self, servers: Sequence[Server], rollout: str) -> None:
        self._servers = servers
        self._patience_s = servers[0].settings.outage_patience_s
        self._draw = {server: hashlib.sha256(f"{rollout} {server.url}".encode()).digest() for server in servers}
        self._tried: Counter[Server] = Counter()
        self._last: Server | None = None
        """The server of the last attempt."""
        self._refused_by: set[Server] = set()
        """Servers whose outage has outlasted its patience."""
        self._rounds = 0
        self._gives_up_at: float | None = None

    @property
    def may_leave(self) -> bool:
        """Whether there is another server to go to."""
        return len(self._servers) > 1

    @contextmanager
    def next(self) -> Iterator[Server]:
        """Give the server of the next attempt, which counts as being there until the end of the block."""
        server = self._choose()
        server.attempts += 1
        try:
            yield server
        finally:
            server.attempts -= 1

    async def moves_on(self, server: Server, turned_away: Pass | None) -> bool:
        """Return whether an attempt that the server turned away begins anew, once that makes sense.

        False for an attempt that was made, and for one that all servers turned away for longer than their patience.
        """
        if turned_away is None:
            self._tried[server] += 1
            self._last = server
            self._refused_by.clear()
            self._rounds, self._gives_up_at = 0, None
            return False
        now = time.monotonic()
        server.turned_away()
        if self._gives_up_at is None:
            self._gives_up_at = now + self._patience_s
        if turned_away is Pass.REFUSED:
            self._refused_by.add(server)
        else:
            self._refused_by.discard(server)
        # The gates know best how long an outage has lasted. The rollout's own patience is for a server that only this
        # machine can't reach: its gate opens again and again, since it answers the others.
        if len(self._refused_by) == len(self._servers) or now > self._gives_up_at:
            return False
        if all(other.down_until > now for other in self._servers):
            await asyncio.sleep(backoff_s(self._rounds))
            self._rounds += 1
        return True

    def _choose(self) -> Server:
        """Return a server that is up; of these one that this rollout has tried least and this event loop uses least.

        Every agent-loop worker spreads its own rollouts evenly, so their sum is even without a word between them. What
        counts is what waits or runs, not what was handed out: a slow server gets less. Equal servers are drawn by the
        rollout's name: were the first in the list taken, workers with few rollouts would all load that one. A server
        that fails fast looks idle; it costs a rollout one attempt, since the next goes to another, until its gate
        counts it as down. If all are down, the one that was found down first is asked first.
        """
        now = time.monotonic()
        return min(
            self._servers,
            key=lambda server: (
                max(0.0, server.down_until - now),
                self._tried[server],
                server is self._last,
                server.attempts,
                self._draw[server],
            ),
        )
