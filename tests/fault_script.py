"""The fault script of the fake environment: which call of which session shows which symptom, and how often."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Do(StrEnum):
    """What a fault does to the call that it fits."""

    STATUS = "status"  # answers `status` with `text` as a JSON string
    ANSWER = "answer"  # answers 200 with `body`
    ERROR = "error"  # answers 200 with `text` as the action's error
    HANG = "hang"  # answers only after `FakeEnvironment.release()`, and then as if nothing had happened
    DISCONNECT = "disconnect"  # drops the connection
    GARBAGE = "garbage"  # answers 200 with `text`, which need not be JSON
    KILL_BROWSER = "closed"  # kills the session's browser, then serves the call
    CRASH_PAGE = "crashed"  # kills the renderer, then serves the call
    KILL_DRIVER = "driver"  # kills Playwright's driver, then serves the call
    LOSE_SESSION = "lose_session"  # forgets the session, then serves the call


@dataclass(frozen=True)
class CallPlace:
    """Where a call stands in its session: what faults are chosen by."""

    path: str
    session: int
    call: int
    step: int | None
    start: str
    """The start address that the session was seeded with."""
    draw: float
    """The session's number in [0, 1) that a fault's share is compared with."""


@dataclass(frozen=True)
class Fault:
    """One line of the fault script; a None fits everything. The first line that fits a call strikes it."""

    do: Do
    path: str | None = None
    session: int | None = None
    """Number of the session, from 1; a seed counts as part of the session that it opens."""
    call: int | None = None
    """Number of the call among the session's calls of the same path, from 1."""
    step: int | None = None
    """Number of the tool call among all of the session's, of any path, from 1; seed, verify and close have none."""
    share: float | None = None
    """Strikes this share of the sessions, 0 to 1. Two faults of one script draw alike: a session that a share of 0.2
    strikes, one of 0.7 strikes too, so that faults of growing shares break disjoint sessions where the first one ends
    the session."""
    site: str | None = None
    """Beginning of the start address of the sessions that the fault is for."""
    times: int | None = None
    """How often the fault strikes; None: always."""
    status: int = 500
    text: str = "Internal Server Error"
    body: Any = None
    retry_after: str | None = None
    """Text of the answer's Retry-After header; None: the answer has none."""

    def fits(self, call: CallPlace) -> bool:
        """Whether the fault is meant for this call."""
        wanted = ((self.path, call.path), (self.session, call.session), (self.call, call.call), (self.step, call.step))
        if not call.start.startswith(self.site or ""):
            return False
        return all(want in (None, got) for want, got in wanted) and (self.share is None or call.draw < self.share)


def share_draw(seed: int, session: int) -> float:
    """Return the session's number in [0, 1): a fault whose share is above it strikes the session."""
    digest = hashlib.sha256(f"{seed} {session}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64
