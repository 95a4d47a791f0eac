"""One call of the environment's HTTP contract as it went over the wire, kept for a recording."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """A request, and what came back: an answer, an error of the client, or neither where the caller gave up."""

    path: str
    request: Mapping[str, Any]
    status: int | None = None
    """None without an answer."""
    text: str = ""
    """The answer's body."""
    set_cookie: bool = False
    retry_after: str | None = None
    error: str = ""
    """Names of the exception's classes, the narrowest first; empty if none was raised."""
    elapsed_s: float | None = None
    """None where the caller gave up."""
    _started: float = field(default_factory=time.monotonic, repr=False)

    def answered(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        """Note the answer."""
        self.status, self.text, self.set_cookie = status, text, "Set-Cookie" in headers
        self.retry_after, self.elapsed_s = headers.get("Retry-After"), time.monotonic() - self._started

    def failed(self, error: BaseException) -> None:
        """Note why there is no answer, or none that can be read."""
        self.error = " ".join(cls.__name__ for cls in type(error).__mro__ if cls not in (BaseException, object))
        if self.elapsed_s is None:
            self.elapsed_s = time.monotonic() - self._started
