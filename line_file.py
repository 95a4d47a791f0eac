"""A file that lines are appended to, and a thread that does it: nothing here raises, or holds up an event loop.

One line is one write call, so a process that is killed leaves at most one broken line, and several processes may share
a folder (each has a file of its own).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""How long a caller waits for the disk. One that takes longer holds up nobody until it has caught up."""
MOST_WAITING = 2000
"""Lines that may wait for the disk; further ones are given up."""


class LineFile:
    """Appends lines to a file of one process. Not thread-safe: `LineWriter` sees to that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes of the file, as far as known."""
        self._warned = False
        self._whole = False
        """Whether the file is known to end with a whole line."""

    def append(self, line: bytes) -> bool:
        """Return whether the line, without its end, was written. What went wrong first is said in one warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                self.size = file.seek(0, 2)
                # After half a line (a full disk, a killed process of the same id) the next one must not be lost too.
                start = b"" if self._whole or self.size == 0 else b"\n"
                self._whole = False
                content = start + line + b"\n"
                written = file.write(content)
                self.size += written
            if written < len(content):
                raise OSError(f"only {written} of {len(content)} bytes could be written")
            self._whole = True
            return True
        except OSError as error:
            self.warn(error)
            return False

    def warn(self, reason: object) -> None:
        """Say once why lines are missing."""
        if not self._warned:
            logger.warning("Lines are missing in %s, and training goes on without them: %s", self.path, reason)
            self._warned = True


class PatientThread:
    """Does work that waits for a disk, in turn, in a thread of its own. Never raises."""

    def __init__(self, what: str) -> None:
        """Make the thread; `what` names its work in messages."""
        self._what = what
        self._counting = threading.Lock()
        self._waiting = 0
        self._late = False
        self._full = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log")

    async def run(self, work: Callable[[], object]) -> None:
        """Do the work, which raises nothing; return once it is done or, with a slow disk, after PATIENCE_S."""
        if self._waiting >= MOST_WAITING:
            if not self._full:
                logger.warning("%s: %d pieces of work wait for the disk; some are given up", self._what, self._waiting)
            self._full = True
            return
        with self._counting:
            self._waiting += 1
        future = self._thread.submit(work)
        future.add_done_callback(self._done)
        if self._late:
            return
        _, late = await asyncio.wait({asyncio.wrap_future(future)}, timeout=PATIENCE_S)
        if late:
            self._late = True
            logger.warning("%s: the disk took longer than %g s; not waited for any more", self._what, PATIENCE_S)

    def close(self) -> None:
        """Return once all work is done."""
        self._thread.shutdown()

    def _done(self, future: Future) -> None:
        with self._counting:
            self._waiting -= 1
            self._late = self._late and self._waiting > 0


class LineWriter:
    """Makes lines and appends them, each in turn: in a thread of its own, or in the caller's."""

    def __init__(self, path: Path) -> None:
        self.file = LineFile(path)
        self.thread = PatientThread(f"{path}")
        self._lock = threading.Lock()

    def write(self, make: Callable[[int], bytes]) -> bool:
        """Return whether the line was written that `make` returns; `make` gets the size of the file before it."""
        with self._lock:
            try:
                line = make(self.file.size)
            except Exception as error:  # noqa: BLE001 - whatever a record holds must not cost the rollout
                self.file.warn(f"{type(error).__name__}: {error}")
                return False
            return self.file.append(line)

    async def append(self, make: Callable[[int], bytes]) -> None:
        """Write a line in the thread, as PatientThread does its work.

        Waiting for the line is what makes a killed process lose none of an attempt that it had finished.
        """
        await self.thread.run(lambda: self.write(make))
