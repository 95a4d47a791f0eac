"""Serves a recorded attempt as an environment server, so that an episode can be played again without a browser.

    python smoke_environment.py --replay FILE [--port 8900] [--host 127.0.0.1]

Each session gets the recorded answers in their order. A request that differs from the recorded one is answered with
409 and with what was expected. Where the recording has no answer there is none here either: a call that timed out hangs
until its client gives up, a connection that broke is broken again. A connection that was refused can't be refused by a
server that listens, so these calls are left out. What is masked in the recording matches any text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from secret_masking import MASK

COOKIE = "replayed_session"
_VERIFY, _CLOSE = "/verify", "/close_session"
_HANGS = ("TimeoutError",)
"""Errors of a client that waited in vain; after the others the connection was gone."""


class ReplayError(ValueError):
    """A file that is no recording: which one, where in it, and what is wrong."""


@dataclass(frozen=True)
class Recording:
    """A recorded attempt."""

    name: str
    exchanges: tuple[dict[str, Any], ...]
    """In their order, those that a server can answer."""

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Return the recording in a file. Raises ReplayError."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ReplayError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ReplayError(f"{path}: no JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("exchanges"), list):
            raise ReplayError(f"{path}: no recording: a JSON object with `exchanges`, a list, is expected")
        for number, exchange in enumerate(content["exchanges"]):
            if isinstance(exchange, dict) and "event" in exchange:
                raise ReplayError(f"{path}: exchanges[{number}]: {exchange['event']} needs a real server")
            if problem := _problem(exchange):
                raise ReplayError(f"{path}: exchanges[{number}]: {problem}")
        sessions = {exchange["session"] for exchange in content["exchanges"]}
        if len(sessions) > 1:
            raise ReplayError(f"{path}: exchanges of {len(sessions)} sessions; only one can be replayed")
        answered = (exchange for exchange in content["exchanges"] if not exchange.get("unreachable"))
        return cls(str(content.get("name", path.stem)), tuple(answered))


def _problem(exchange: Any) -> str:
    if not isinstance(exchange, dict):
        return "no JSON object"
    for key, kinds in (("session", str), ("path", str), ("request", dict | None)):
        if key not in exchange or not isinstance(exchange[key], kinds):
            return f"`{key}` is missing or of the wrong type"
    if "status" in exchange:
        if not isinstance(exchange["status"], int) or ("response" in exchange) == ("text" in exchange):
            return "`status` needs a number, and beside it one of `response` and `text`"
    elif not any(exchange.get(key) for key in ("unreachable", "error", "given_up")):
        return "neither `status` nor one of `unreachable`, `error`, `given_up`"
    return ""


class ReplayServer:
    """The server; `async with ReplayServer(recording) as server` listens at `server.url`."""

    def __init__(self, recording: Recording, host: str = "127.0.0.1", port: int = 0) -> None:
        self.recording = recording
        self._address = (host, port)
        self._places: dict[str, int] = {}
        """Number of the next exchange of each session."""
        self._stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The server's base address."""
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> ReplayServer:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, *self._address).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        session = request.cookies.get(COOKIE, "")
        if session not in self._places:
            session = uuid4().hex
            self._places[session] = 0
        body = await request.text()
        response = await self._answer(request, session, body)
        response.set_cookie(COOKIE, session)
        return response

    async def _answer(self, request: web.Request, session: str, body: str) -> web.Response:
        exchanges, place = self.recording.exchanges, self._places[session]
        expected = exchanges[place] if place < len(exchanges) else None
        if request.path == _CLOSE and (expected is None or expected["path"] != _CLOSE):
            return web.json_response({"closed": True})  # a client may close whenever it likes
        if expected is None:
            return self._refusal(place, f"the recording ends here, and {request.path} {body} came")
        if request.path != expected["path"] or not _same_body(expected, body):
            wanted = f"{expected['path']} {json.dumps(expected['request'], ensure_ascii=False)}"
            return self._refusal(place, f"expected {wanted}, and {request.path} {body} came")
        self._places[session] += 1
        if "status" not in expected:
            if not expected.get("error") or any(name in expected["error"].split() for name in _HANGS):
                await self._stopping.wait()
            request.transport.abort()
            return web.Response(status=500)
        headers = {"Retry-After": expected["retry_after"]} if "retry_after" in expected else {}
        if "text" in expected:
            return web.Response(text=expected["text"], status=expected["status"], headers=headers)
        return web.json_response(expected["response"], status=expected["status"], headers=headers)

    def _refusal(self, place: int, why: str) -> web.Response:
        text = f"request {place + 1} of {self.recording.name} differs from the recording: {why}"
        return web.Response(text=text, status=409)


def _same_body(expected: dict[str, Any], body: str) -> bool:
    """Return whether a request is the recorded one; the server scores a session without reading the request."""
    if expected["path"] == _VERIFY:
        return True
    try:
        given = json.loads(body) if body else None
    except ValueError:
        return False
    return _same(expected["request"], given)


def _same(recorded: Any, given: Any) -> bool:
    if isinstance(recorded, str) and isinstance(given, str) and MASK in recorded:
        return re.fullmatch(".*".join(map(re.escape, recorded.split(MASK))), given, re.DOTALL) is not None
    if isinstance(recorded, dict) and isinstance(given, dict):
        return recorded.keys() == given.keys() and all(_same(value, given[key]) for key, value in recorded.items())
    if isinstance(recorded, list) and isinstance(given, list):
        return len(recorded) == len(given) and all(map(_same, recorded, given))
    return type(recorded) is type(given) and recorded == given


async def serve(recording: Recording, host: str, port: int) -> None:
    """Serve until the task is cancelled. Raises OSError where the address can't be had."""
    async with ReplayServer(recording, host, port) as server:
        print(
            f"replaying {recording.name} ({len(recording.exchanges)} requests) at {server.url}\n"
            f"play it with NEMO_GYM_URL={server.url}; Ctrl-C ends it",
            flush=True,
        )
        await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a recording until Ctrl-C. Return 0; 1 where the address is taken; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="smoke_environment.py", description="Serve a recorded attempt as an environment server."
    )
    parser.add_argument("--replay", type=Path, required=True, metavar="FILE", help="recording to serve")
    parser.add_argument("--port", type=int, default=8900, help="port to listen at (default 8900; 0: any)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.port < 65536:
        parser.error(f"--port {arguments.port}: must be from 0 to 65535")
    try:
        recording = Recording.read(arguments.replay)
    except ReplayError as error:
        parser.error(f"--replay {error}")
    try:
        asyncio.run(serve(recording, arguments.host, arguments.port))
    except OSError as error:
        print(f"can't listen at {arguments.host}:{arguments.port}: {error.strerror}; choose a --port", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # the way to end it
    return 0
