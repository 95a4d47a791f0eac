"""The practice judge with a memory: what was asked, and how many requests were under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from cpu.practice_judge import Answer, Fault, PracticeJudge

__all__ = ["Answer", "Fault", "JudgeServer", "says"]


def says(*texts: str) -> list[Answer]:
    """Return answers that each reply with one of the texts."""
    return [Answer(Fault.SAY, text=text) for text in texts]


class JudgeServer(PracticeJudge):
    """Records each request; `hold()` makes requests wait for `release()`."""

    def __init__(self, *script: Answer | Fault) -> None:
        super().__init__([Answer(line) if isinstance(line, Fault) else line for line in script])
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.under_way = 0
        self.most_under_way = 0
        self._released = asyncio.Event()
        self._released.set()
        self._changed = asyncio.Condition()

    @property
    def formats(self) -> list[str | None]:
        """The type of `response_format` of each request."""
        return [(body.get("response_format") or {}).get("type") for body in self.bodies]

    def hold(self) -> None:
        """Let requests arrive and wait."""
        self._released.clear()

    def release(self) -> None:
        """Answer those that wait, and those to come."""
        self._released.set()

    async def arrived(self, count: int) -> None:
        """Return once this many requests have arrived in all."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.bodies) >= count)

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        async with self._changed:
            self._changed.notify_all()
        try:
            await self._released.wait()
            return await super().answer(request, body)
        finally:
            self.under_way -= 1
