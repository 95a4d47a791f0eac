"""Recorded exchanges of the real interactive_browser server, replayed against any server that claims the contract.

A recording is one JSON object: `name`, `exchanges`. An exchange is either a call (`session`, `path`, `request`,
`status`, `set_cookie`, `response`; or `unreachable` where the server was down) or an `event` that somebody has to
bring about: kill_browser, kill_renderer, kill_driver, stop_server, start_server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

FOLDER = Path(__file__).parent / "data" / "recordings"
TIMEOUT_S = 60.0

DRIVER_GONE = "the driver is gone"

# What differs between machines and runs without being part of the contract.
_MACHINE_SPECIFIC = (
    (re.compile(r"file://[^\s\"']*?/resources_servers/interactive_browser/"), "file:///GYM/"),
    (re.compile(r"0x[0-9a-f]+"), "0x0"),
    # Chromium's builds differ in their error page (headless-shell gives it no title): its address is the contract.
    (re.compile(r"(?s)^(URL: chrome-error://chromewebdata/).*"), r"\1"),
    # Whether Playwright has read the browser's own output before the next call finds it dead is timing.
    (re.compile(r"(?s)\nBrowser logs:\n.*"), ""),
    # So is the end of the pipe at which a dead driver shows. rollout_failures.py must know both texts.
    (re.compile(r"\w+: (?=[\w.]+: (unable to perform operation on <WriteUnixTransport|Connection closed while))"), ""),
    (
        re.compile(
            r"unable to perform operation on <WriteUnixTransport[^>]*>; the handler is closed"
            r"|Connection closed while reading from the driver"
        ),
        DRIVER_GONE,
    ),
)

OnEvent = Callable[[str], Awaitable[None]]


def load_recordings() -> dict[str, dict[str, Any]]:
    """Return every recording by name."""
    recordings = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    return {recording["name"]: recording for recording in recordings}


async def compare_exchange(base_url: str, recording: Mapping[str, Any], on_event: OnEvent | None = None) -> list[str]:
    """Return the differences between a recording and what the server at base_url does now; none is a pass."""
    differences: list[str] = []
    clients: dict[str, aiohttp.ClientSession] = {}
    try:
        for i, exchange in enumerate(recording["exchanges"]):
            where = f"{recording['name']}[{i}] {exchange.get('path', exchange.get('event'))}"
            if "event" in exchange:
                if on_event is None:
                    return [*differences, f"{where}: needs on_event"]
                await on_event(exchange["event"])
                continue
            session = exchange["session"]
            if session not in clients:
                clients[session] = _client()
            differences += [f"{where}: {text}" for text in await _differences(clients[session], base_url, exchange)]
    finally:
        for client in clients.values():
            await client.close()
    return differences


def _client() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=timeout)


async def _differences(client: aiohttp.ClientSession, base_url: str, exchange: Mapping[str, Any]) -> list[str]:
    body = {"json": exchange["request"]} if exchange["request"] is not None else {}
    try:
        async with client.post(base_url + exchange["path"], **body) as response:
            got = {
                "status": response.status,
                "set_cookie": "Set-Cookie" in response.headers,
                "response": await response.json(),
            }
    except aiohttp.ClientConnectionError:
        return [] if exchange.get("unreachable") else ["the server can't be reached"]
    if exchange.get("unreachable"):
        return [f"the server should be down, but answers {got}"]
    return [
        f"{key} is {_normal(got[key])!r}, recorded {_normal(exchange[key])!r}"
        for key in ("status", "set_cookie", "response")
        if _normal(got[key]) != _normal(exchange[key])
    ]


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        for pattern, replacement in _MACHINE_SPECIFIC:
            value = pattern.sub(replacement, value)
        return value
    if isinstance(value, dict) and "detail" in value and isinstance(value["detail"], list):
        return sorted((problem["type"], *problem["loc"]) for problem in value["detail"])
    if isinstance(value, dict):
        # /verify gives the request's two parts back, padded with the defaults of this version's schema.
        return {k: "..." if k in ("responses_create_params", "response") else _normal(v) for k, v in value.items()}
    return value
