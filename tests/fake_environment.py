"""A fake interactive_browser server: the recorded HTTP contract over pages that are Python data, with scripted faults.

    async with FakeEnvironment(site=SITE, faults=[Fault(Do.HANG, path="/browser_observe")]) as environment:
        ...  # NEMO_GYM_URL is environment.url

    # Half of the sessions lose their browser at their third action, a further fifth fails to open.
    faults = [
        Fault(Do.STATUS, path="/seed_session", share=0.2, status=503, retry_after="1"),
        Fault(Do.KILL_BROWSER, step=3, share=0.7),
    ]

Deterministic: sessions are numbered in the order of their seeds, calls in the order in which they arrive, and which
sessions a `share` strikes follows from the environment's seed and the session's number alone.
Source: nemo-gym 0.7.0, resources_servers/interactive_browser/app.py; tests/data/recordings hold it to that.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from tests.fake_site import GYM_FILES, GYM_SITE, Browser, BrowserError, FakeBrowser, Site
from tests.fault_script import CallPlace, Do, Fault, share_draw

__all__ = ["Browser", "Do", "FakeEnvironment", "Fault", "Observed", "SeenCall"]

COOKIE = "InteractiveBrowserResourcesServer___interactive_browser"
SCORING_KEYS = ("final_url", "url_contains", "dom_contains", "answer_equals")
NO_SESSION = "no active session; seed_session must be called first"
TOOLS: Mapping[str, Mapping[str, type]] = {
    "/browser_observe": {},
    "/browser_navigate": {"url": str},
    "/browser_click": {"element_id": int},
    "/browser_type": {"element_id": int, "text": str},
    "/browser_finish": {},
}
RESPONSE_FIELDS = ("id", "created_at", "model", "object", "output", "tool_choice", "parallel_tool_calls", "tools")


@dataclass(frozen=True)
class SeenCall:
    """One call as the fake saw it arrive."""

    session: int
    path: str
    body: Any


@dataclass
class _Session:
    number: int
    browser: Browser
    spec: Mapping[str, Any]
    answer: str | None = None
    finished: tuple[str, str] | None = None


@dataclass
class Observed:
    """What tests ask about afterwards."""

    calls: list[SeenCall] = field(default_factory=list)
    seeded: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    peak_open: int = 0
    """Most sessions that were open at once."""
    peak_opening: int = 0
    """Most seeds and verifies that were under way at once."""
    overlapping: list[str] = field(default_factory=list)
    """Paths of calls that arrived on a cookie while another was under way, other than /close_session."""

    def paths(self, session: int | None = None) -> list[str]:
        """Return the paths of the calls of one session, or of all."""
        return [call.path for call in self.calls if session in (None, call.session)]


class FakeEnvironment:
    """The server. Stopping it keeps its address and loses its sessions, as a restart of the real one does."""

    def __init__(
        self,
        site: Site = GYM_SITE,
        faults: Iterable[Fault] = (),
        port: int = 0,
        *,
        seed: int = 0,
        browser_factory: Callable[[], Browser] | None = None,
        latency_s: Mapping[str, float] | None = None,
    ) -> None:
        """Args: browser_factory opens each session's browser; None: a FakeBrowser on `site`, to which it is bound.
        latency_s holds each answer of a path back by so many seconds."""
        self.site: dict[str, Any] = {**GYM_SITE, **site}
        self.seed = seed
        self._open_browser = browser_factory or (lambda: FakeBrowser(self.site))
        self.faults = list(faults)
        self.seen = Observed()
        self.port = port
        self._latency_s = latency_s or {}
        self._starts: dict[str, str] = {}
        self._struck: Counter[int] = Counter()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._steps: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        self._sessions: dict[str, _Session] = {}
        self._under_way: Counter[str] = Counter()
        self._opening = 0
        self._cookies = 0
        self._released = asyncio.Event()
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The server's base address; its host is an IP address, as in a training run on one machine."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_sessions(self) -> set[int]:
        """Numbers of the sessions that hold a browser."""
        return {session.number for session in self._sessions.values()}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after a stop, on the same port."""
        self._released = asyncio.Event()
        app = web.Application()
        for path in (*TOOLS, "/seed_session", "/verify", "/close_session"):
            app.router.add_post(path, self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        server = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await server.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections from now on and lose every session; calls that hang are answered first."""
        self.release()
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None
        self.seen.released |= self.open_sessions
        self._sessions.clear()

    def release(self) -> None:
        """Let every call that hangs go on, now and from now on."""
        self._released.set()

    async def until(self, happened: Callable[[Observed], bool]) -> None:
        """Wait for the arrival of the call that makes `happened` true."""
        while not happened(self.seen):
            await self._changed.wait()

    async def close_idle_connections(self) -> None:
        """Close every connection, as a server does after its keep-alive time; no call may be under way."""
        assert not self._under_way.total(), "a connection with a call under way is not idle"
        for connection in list(self._runner.server.connections):
            connection.transport.close()
        while self._runner.server.connections:
            await asyncio.sleep(0)
        for _ in range(3):  # a client in the same event loop reads the end of its connection in the next rounds
            await asyncio.sleep(0)

    def kill_browsers(self, how: Do = Do.KILL_BROWSER) -> None:
        """Kill the browser, renderer or driver of every open session."""
        for session in self._sessions.values():
            session.browser.death = how.value

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        session_id = _session_id(request.cookies.get(COOKIE, ""))
        if session_id is None:
            self._cookies += 1
            session_id = hashlib.sha256(f"session {self._cookies}".encode()).hexdigest()[:32]
        if request.path == "/seed_session":
            self._numbers[session_id] = len(self.seen.seeded) + 1
            self.seen.seeded.add(self._numbers[session_id])
        number = self._numbers.get(session_id, 0)
        raw = await request.text()
        call = SeenCall(number, request.path, json.loads(raw) if raw else None)
        self.seen.calls.append(call)
        self._changed.set()
        self._changed = asyncio.Event()
        if self._under_way[session_id] and request.path != "/close_session":
            self.seen.overlapping.append(request.path)
        opening = request.path in ("/seed_session", "/verify")
        self._under_way[session_id] += 1
        self._opening += opening
        self.seen.peak_opening = max(self.seen.peak_opening, self._opening)
        try:
            response = await self._struck_or_answered(request, session_id, call)
        finally:
            self._under_way[session_id] -= 1
            self._opening -= opening
        if response.status < 500:
            response.set_cookie(COOKIE, _cookie(session_id), max_age=1209600, httponly=True, samesite="lax")
        return response

    async def _struck_or_answered(self, request: web.Request, session_id: str, call: SeenCall) -> web.Response:
        self._counts[session_id, call.path] += 1
        self._steps[session_id] += call.path in TOOLS
        step = self._steps[session_id] if call.path in TOOLS else None
        if call.path == "/seed_session":
            self._starts[session_id] = str(call.body.get("initial_url", ""))
        if call.path in self._latency_s:
            await asyncio.sleep(self._latency_s[call.path])
        start = self._starts.get(session_id, "")
        fault = self._fault(self.place(call.path, call.session, self._counts[session_id, call.path], step, start))
        response = await self._answer_under(fault, request, session_id, call)
        if fault is not None and fault.retry_after is not None:
            response.headers["Retry-After"] = fault.retry_after
        return response

    async def _answer_under(
        self, fault: Fault | None, request: web.Request, session_id: str, call: SeenCall
    ) -> web.Response:
        match fault.do if fault else None:
            case Do.STATUS:
                return web.json_response(fault.text, status=fault.status)
            case Do.ANSWER:
                return web.json_response(fault.body)
            case Do.ERROR:
                return web.json_response({"observation": "", "done": False, "error": fault.text})
            case Do.GARBAGE:
                return web.Response(text=fault.text, content_type="text/html")
            case Do.DISCONNECT:
                request.transport.abort()
                return web.Response(status=500)
            case Do.HANG:
                await self._released.wait()
            case Do.LOSE_SESSION:
                self._sessions.pop(session_id, None)
            case Do.KILL_BROWSER | Do.CRASH_PAGE | Do.KILL_DRIVER if session_id in self._sessions:
                self._sessions[session_id].browser.death = fault.do.value
        return self._answer(session_id, call)

    def place(self, path: str, session: int, call: int = 1, step: int | None = None, start: str = "") -> CallPlace:
        """Return where a call stands, for a fault to be compared with."""
        return CallPlace(path, session, call, step, start, share_draw(self.seed, session))

    def _fault(self, call: CallPlace) -> Fault | None:
        for i, fault in enumerate(self.faults):
            if fault.fits(call) and (fault.times is None or self._struck[i] < fault.times):
                self._struck[i] += 1
                return fault
        return None

    def _answer(self, session_id: str, call: SeenCall) -> web.Response:
        path, body = call.path, call.body
        if path == "/close_session":
            self._release(session_id)
            return web.json_response({"closed": True})
        if path == "/seed_session":
            return self._seed(session_id, call.session, body)
        problems = _problems(path, body)
        if problems:
            return web.json_response({"detail": problems}, status=422)
        session = self._sessions.get(session_id)
        if path == "/verify":
            return self._verify(session_id, session, body)
        if session is None:
            return web.json_response({"observation": "", "done": False, "error": NO_SESSION})
        return web.json_response(_act(session, path, body or {}))

    def _seed(self, session_id: str, number: int, body: Any) -> web.Response:
        self._release(session_id)
        url = body.get("initial_url", "about:blank")
        browser = self._open_browser()
        try:
            if url:
                browser.goto(url if ":" in url else GYM_FILES + url)
        except BrowserError as error:
            return web.json_response(f"{error.kind}({str(error)!r})", status=500)
        self._sessions[session_id] = _Session(number, browser, body.get("verifier_metadata") or {})
        self.seen.peak_open = max(self.seen.peak_open, len(self._sessions))
        return web.json_response({})

    def _verify(self, session_id: str, session: _Session | None, body: Any) -> web.Response:
        reward, reason = 0.0, None
        if session is None:
            reason = "browser session not found at verify"
        else:
            try:
                reward = _score(session)
            except (BrowserError, TypeError) as error:
                kind = error.kind if isinstance(error, BrowserError) else type(error).__name__
                reason = f"browser unreachable while scoring: {kind}: {error}"
            except LookupError as error:
                return web.json_response(f"ValueError({error.args[0]!r})", status=500)
            finally:
                self._release(session_id)
        # The server echoes what the request carries, a failure_kind of the client's own included.
        echoed = {"failure_kind": None, **{k: v for k, v in body.items() if not k.startswith("_ng_")}}
        return web.json_response({**echoed, "reward": reward, "mask_sample": False, "failure_reason": reason})

    def _release(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.seen.released.add(session.number)


def _act(session: _Session, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    browser, name = session.browser, path.removeprefix("/browser_")
    try:
        match name:
            case "navigate":
                browser.goto(body["url"])
            case "click":
                browser.click(int(body["element_id"]))
            case "type":
                browser.type(int(body["element_id"]), body["text"])
            case "finish":
                _finish(session, body.get("answer", ""))
                return {"observation": "", "done": True, "error": None}
        return {"observation": browser.observe(), "done": False, "error": None}
    except BrowserError as error:
        return {"observation": "", "done": False, "error": f"{name} failed: {error}"}


def _finish(session: _Session, answer: str) -> None:
    """Keep the first answer and the page as it is; a dead browser leaves no page, and finish says nothing of it."""
    if session.finished is not None:
        return
    session.answer = answer
    try:
        session.finished = _graded_page(session.browser)
    except BrowserError:
        session.finished = None


def _graded_page(browser: Browser) -> tuple[str, str]:
    browser.observe(max_elements=0)
    return browser.url, f"{browser.title} {browser.text()}"


def _score(session: _Session) -> float:
    spec = session.spec
    if "answer_equals" in spec:
        return float((session.answer or "").strip() == str(spec["answer_equals"]).strip())
    url, text = session.finished or _graded_page(session.browser)
    if "final_url" in spec:
        return float(url == spec["final_url"])
    if "url_contains" in spec:
        return float(spec["url_contains"] in url)
    if "dom_contains" in spec:
        return float(str(spec["dom_contains"]).lower() in text.lower())
    known = list(SCORING_KEYS)
    raise LookupError(f"verifier_metadata has no supported scoring key (got {sorted(spec)}; expected one of {known})")


def _problems(path: str, body: Any) -> list[dict[str, Any]]:
    """Return what FastAPI would find wrong with a body, in its words."""
    fields = body if isinstance(body, dict) else {}
    if path == "/verify":
        missing = [("responses_create_params",), ("response",)]
        missing = [loc for loc in missing if loc[0] not in fields]
        if "responses_create_params" in fields and "input" not in fields["responses_create_params"]:
            missing.append(("responses_create_params", "input"))
        if "response" in fields:
            missing += [("response", name) for name in RESPONSE_FIELDS if name not in fields["response"]]
    else:
        missing = [(name,) for name in TOOLS[path] if name not in fields]
    problems = [_problem("missing", loc, "Field required") for loc in missing]
    for name, kind in TOOLS.get(path, {}).items():
        if name in fields and not isinstance(fields[name], kind):
            problems.append(_problem(f"{kind.__name__}_type", (name,), f"Input should be a valid {kind.__name__}"))
    return problems


def _problem(kind: str, loc: tuple[str, ...], message: str) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", *loc], "msg": message}


def _cookie(session_id: str) -> str:
    """Return a cookie that looks like Starlette's: payload, time, signature."""
    payload = base64.b64encode(json.dumps({"session_id": session_id}).encode()).decode()
    return f"{payload}.aw1dcA.{_signature(payload)}"


def _session_id(cookie: str) -> str | None:
    payload, _, signature = cookie.strip('"').rpartition(".aw1dcA.")
    if not payload or signature != _signature(payload):
        return None
    return json.loads(base64.b64decode(payload))["session_id"]


def _signature(payload: str) -> str:
    return hashlib.sha256(f"fake {payload}".encode()).hexdigest()[:27]
