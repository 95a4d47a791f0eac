"""One episode over the environment's HTTP contract without a policy: seed, observe, act, verify, close.

By default the episode runs on the page that the released server ships: it opens site/index.html, clicks `Go to form`,
finishes, and expects the server to score the form's address with 1.0. Any other page is opened, observed and finished,
and expected to score 1.0 for having a page open at all. It speaks HTTP by itself rather than through
environment_session.py, whose sessions wait out an outage and hide the answers that a person wants to see.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from rollout_failures import (
    DEFAULT_BLOCKED_PATTERNS,
    Call,
    CallContext,
    Failure,
    FailureKind,
    classify_error,
    classify_exception,
    classify_observation,
    classify_status,
    classify_verdict,
    failure_of,
    page_url,
)
from smoke_advice import advice_for

SHIPPED_PAGE = "site/index.html"
SHIPPED_LINK = "Go to form"
SHIPPED_TARGET = "form.html"
CONNECT_S = 10.0
KEEPALIVE_S = 10.0
"""Below the 30 s after which NeMo Gym drops an idle connection: reused at that moment, it would look like a crash."""
CLOSE_S = 10.0
"""Longest wait for the close, which comes even after the deadline: an open browser costs the server memory."""

BLOCKED_PATTERNS = tuple(re.compile(pattern, re.IGNORECASE) for pattern in DEFAULT_BLOCKED_PATTERNS)

# The least that /verify takes: it answers 422 without these keys and reads none of them.
VERIFY_BODY = {
    "responses_create_params": {"input": "smoke check"},
    "response": {
        "id": "smoke",
        "created_at": 0,
        "model": "none",
        "object": "response",
        "output": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "tools": [],
    },
}


class StepFailed(Exception):
    """A step whose answer is no healthy one; args: the Failure, the server's answer as it came."""


@dataclass(frozen=True)
class Step:
    """One step of the episode, as it went."""

    name: str
    ok: bool
    elapsed_s: float
    detail: str
    kind: str = ""
    """The failure's; empty when it went well."""


@dataclass
class Report:
    """The check's outcome; filled while the episode runs."""

    url: str
    start_page: str
    checked: str
    """What a healthy answer stands for."""
    steps: list[Step] = field(default_factory=list)
    failed_step: str | None = None
    """The first step that failed; None when healthy."""
    kind: str = ""
    answered: str = ""
    advice: str = ""
    cut_short: bool = False
    """Somebody stopped it: it is neither healthy nor failed."""

    @property
    def healthy(self) -> bool:
        """Whether every step went well."""
        return self.failed_step is None

    @property
    def opened(self) -> bool:
        """Whether the server answered the seed, so that it holds a browser for the session."""
        return any(step.name == "seed" and step.ok for step in self.steps)

    @property
    def closed(self) -> bool:
        """Whether the server answered the close."""
        return any(step.name == "close" and step.ok for step in self.steps)

    def fail(self, step: str, failure: Failure, answered: str) -> None:
        """Note a failed step; the first one counts, since a failed close after it is only its echo."""
        if self.failed_step is None:
            self.failed_step, self.kind, self.answered = step, str(failure.kind), answered
            self.advice = advice_for(failure.kind)

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines."""
        steps = [
            {"step": s.name, "ok": s.ok, "elapsed_s": round(s.elapsed_s, 3), "detail": s.detail} for s in self.steps
        ]
        failure = {"step": self.failed_step, "kind": self.kind, "answered": self.answered, "advice": self.advice}
        verdict = {"healthy": self.healthy, "url": self.url, "checked": self.checked}
        return {**verdict, "steps": steps, "failure": None if self.healthy else failure}


class Deadlines(Protocol):
    """How long the calls of an episode may take."""

    def limit_s(self, call: Call) -> float:
        """Return how long the call that begins now may take."""

    def grace_s(self) -> float:
        """Return how long a cancelled episode waits for a seed, verify or close that is under way."""


class OneDeadline:
    """The deadlines of a single check: one for all calls together, and the close's own."""

    def __init__(self, timeout_s: float):
        self._ends_at = time.monotonic() + timeout_s

    def limit_s(self, call: Call) -> float:
        return CLOSE_S if call is Call.CLOSE else max(self._ends_at - time.monotonic(), 0.001)

    def grace_s(self) -> float:
        return CLOSE_S


class Smoke:
    """One episode: the HTTP session, its deadlines and the report. The phases are run() in one piece, or one by one."""

    def __init__(self, http: aiohttp.ClientSession, report: Report, deadlines: Deadlines, say: Callable[[str], None]):
        self.http = http
        self.report = report
        self.start_page = report.start_page
        self.deadlines = deadlines
        self.say = say
        self.current = ""
        """The step that is under way, or was last."""

    async def step(self, name: str, work: Awaitable[tuple[str, Any]]) -> Any:
        """Return what a step brings, after noting how it went. Raises StepFailed."""
        started = time.monotonic()
        self.current = name
        try:
            detail, value = await work
        except StepFailed as e:
            failure, answered = e.args
            # The report gives the first failure's answer in full; a later one, of the close, has only this line.
            detail = str(failure.kind) if self.report.healthy else f"{failure.kind}: {answered}"
            self.report.fail(name, failure, answered)
            self._note(Step(name, False, time.monotonic() - started, detail, str(failure.kind)))
            raise
        self._note(Step(name, True, time.monotonic() - started, detail))
        return value

    def _note(self, step: Step) -> None:
        self.report.steps.append(step)
        self.say(f"{step.name:<8} {'ok' if step.ok else 'FAILED':<6} {step.elapsed_s:7.3f} s  {step.detail}")

    async def settled(self, name: str, work: Awaitable[tuple[str, Any]]) -> None:
        """Run a step that a cancellation does not break off at once: one that is given up on may leak a browser."""
        step = asyncio.ensure_future(self.step(name, work))
        try:
            await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait({step}, timeout=self.deadlines.grace_s())
            if step.done() and not step.cancelled():
                step.exception()  # noted in the report by step(); asyncio warns of an exception that nobody asked for
            else:
                step.cancel()
                await asyncio.wait({step})
            raise

    async def post(self, call: Call, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object that one call answers. Raises StepFailed on anything else."""
        context = CallContext(call, start_url=self.start_page)
        left_s = self.deadlines.limit_s(call)
        timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=CONNECT_S)
        try:
            async with self.http.post(
                self.report.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                text = await response.text()
                if response.status != 200:
                    answered = f"HTTP {response.status} {_short(text)}"
                    raise StepFailed(classify_status(response.status, text, context), answered)
                answer = json.loads(text)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise StepFailed(classify_exception(e, context), _exception_text(e, left_s)) from e
        if not isinstance(answer, dict):
            raise _unexpected(call, answer, "no JSON object")
        return answer

    async def act(self, call: Call, path: str, body: dict[str, Any]) -> str:
        """Return the observation that one browser action answers. Raises StepFailed."""
        answer = await self.post(call, path, body)
        error, observation = answer.get("error"), answer.get("observation")
        context = CallContext(call, start_url=self.start_page, blocked_patterns=BLOCKED_PATTERNS)
        if error:
            raise StepFailed(classify_error(str(error), context), _short(str(error)))
        if not isinstance(observation, str):
            raise _unexpected(call, answer, "no `observation`")
        failure = classify_observation(observation, context)
        if failure:
            raise StepFailed(failure, _short(observation))
        return observation

    async def seed(self, scoring: dict[str, str]) -> tuple[str, None]:
        body = {"initial_url": self.start_page, "verifier_metadata": scoring}
        answer = await self.post(Call.SEED, "/seed_session", body)
        if not len(self.http.cookie_jar):
            raise _unexpected(Call.SEED, answer, "no session cookie: does a proxy strip cookies?")
        return self.start_page, None

    async def observe(self) -> tuple[str, str]:
        observation = await self.act(Call.OBSERVE, "/browser_observe", {})
        if page_url(observation) is None:
            raise _unexpected(Call.OBSERVE, observation, "no page address in its first line")
        return f"{page_url(observation)}", observation

    async def click_link(self, observation: str) -> tuple[str, None]:
        match = re.search(rf"^\s*\[(\d+)\] \w+: {re.escape(SHIPPED_LINK)}\s*$", observation, flags=re.MULTILINE)
        if not match:
            raise _unexpected(Call.OBSERVE, observation, f"no element `{SHIPPED_LINK}` on {SHIPPED_PAGE}")
        after = await self.act(Call.CLICK, "/browser_click", {"element_id": int(match[1])})
        # An observation that comes right after a click can still show the page that was left.
        if SHIPPED_TARGET not in (page_url(after) or ""):
            after = await self.act(Call.OBSERVE, "/browser_observe", {})
        if SHIPPED_TARGET not in (page_url(after) or ""):
            raise _unexpected(Call.CLICK, after, f"no {SHIPPED_TARGET} after a click on `{SHIPPED_LINK}`")
        return f"`{SHIPPED_LINK}` -> {page_url(after)}", None

    async def finish(self) -> tuple[str, None]:
        answer = await self.post(Call.FINISH, "/browser_finish", {"answer": ""})
        if answer.get("error"):
            context = CallContext(Call.FINISH, start_url=self.start_page)
            raise StepFailed(classify_error(str(answer["error"]), context), _short(str(answer["error"])))
        if answer.get("done") is not True:
            raise _unexpected(Call.FINISH, answer, "not `done: true`")
        return "done", None

    async def verify(self) -> tuple[str, None]:
        answer = await self.post(Call.VERIFY, "/verify", VERIFY_BODY)
        said = {k: answer.get(k) for k in ("reward", "failure_reason", "failure_kind", "mask_sample")}
        failure = classify_verdict(answer, CallContext(Call.VERIFY, start_url=self.start_page))
        if failure:
            raise StepFailed(failure, json.dumps(said))
        if answer["reward"] != 1.0:
            raise _unexpected(Call.VERIFY, said, "not the reward 1.0 of a solved task")
        return f"reward {answer['reward']}", None

    async def close(self) -> tuple[str, None]:
        answer = await self.post(Call.CLOSE, "/close_session", {})
        if answer.get("closed") is not True:
            raise _unexpected(Call.CLOSE, answer, "not `closed: true`")
        return "closed", None

    async def open(self) -> None:
        """Seed the session. Raises StepFailed."""
        shipped = self.start_page == SHIPPED_PAGE
        await self.settled("seed", self.seed({"url_contains": SHIPPED_TARGET if shipped else "://"}))

    async def play(self) -> None:
        """Observe, click the link where the page is the shipped one, and finish. Raises StepFailed."""
        observation = await self.step("observe", self.observe())
        if self.start_page == SHIPPED_PAGE:
            await self.step("click", self.click_link(observation))
        await self.step("finish", self.finish())

    async def score(self) -> None:
        """Verify. Raises StepFailed."""
        await self.settled("verify", self.verify())

    async def end(self) -> None:
        """Close the session if the seed was answered; without its cookie there is none that a close could name."""
        if self.report.opened:
            try:
                await self.settled("close", self.close())
            except StepFailed:
                pass  # noted in the report by step()

    async def run(self) -> None:
        """Play the episode; the report says how it went. A session that was opened is closed whatever happens."""
        try:
            await self.open()
            await self.play()
            await self.score()
        except StepFailed:
            pass  # noted in the report by step(); the close still has to happen
        finally:
            await self.end()


def _short(text: str) -> str:
    """Return the text on one line, cut in the middle: Chromium's own words stand behind Playwright's long command."""
    line = " ".join(text.split())
    return line if len(line) <= 800 else f"{line[:300]} [...] {line[-500:]}"


def _exception_text(error: Exception, left_s: float) -> str:
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no answer within {left_s:.1f} s"
    return _short(f"{type(error).__name__}: {error}")


def _unexpected(call: Call, answer: Any, lacking: str) -> StepFailed:
    shown = answer if isinstance(answer, str) else json.dumps(answer)
    answered = f"{lacking} in: {_short(shown)}"
    return StepFailed(failure_of(FailureKind.MALFORMED_ANSWER, f"{call}: {answered}"), answered)


def new_report(url: str, start_page: str) -> Report:
    """Return the empty report of an episode on a server, which says what its healthy answer will stand for."""
    did = f"clicked `{SHIPPED_LINK}`, finished and scored" if start_page == SHIPPED_PAGE else "finished and scored"
    return Report(url, start_page, f"opened {start_page}, observed, {did}")


def http_session() -> aiohttp.ClientSession:
    """Return a client with cookies and connections of its own, without aiohttp's limits of time and connections."""
    return aiohttp.ClientSession(
        # unsafe: aiohttp's default jar drops the cookies of hosts that are named by their IP address.
        cookie_jar=aiohttp.CookieJar(unsafe=True),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def check(url: str, start_page: str, timeout_s: float, say: Callable[[str], None]) -> Report:
    """Return the report of one episode against the server at `url`; takes at most `timeout_s` and one close."""
    report = new_report(url, start_page)
    async with http_session() as http:
        await Smoke(http, report, OneDeadline(timeout_s), say).run()
    return report
