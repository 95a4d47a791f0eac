"""One browser session over NeMo Gym's HTTP contract: seed, act, verify, close, each with a deadline and typed failures.

The traps that shape this module (nemo-gym 0.7.0, interactive_browser):
- A client that gives up on a seed or a verify leaks a browser until the server exits. Both run shielded to their end,
  whatever becomes of the rollout, and the session is closed only then.
- An observe has no time limit of its own while a navigation is pending; only /close_session frees such a session.
- Once the browser is dead, later answers look normal: an element that is not there, a finish that is done, a reward
  of 0 without a reason. The first fatal failure is latched and the server is not asked again.
- Two seeds at once on one cookie leak a browser: one lock per session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from environment_gate import EnvironmentGate, Pass
from exchanges import Exchange
from rollout_failures import (
    Call,
    CallContext,
    Failure,
    FailureKind,
    Fault,
    classify_error,
    classify_exception,
    classify_observation,
    classify_status,
    classify_verdict,
    failure_of,
)

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

__all__ = ["ActionName", "BrowserAction", "BrowserSession", "EnvironmentGate", "StepResult", "Verdict"]

logger = logging.getLogger(__name__)

# NeMo Gym's servers drop a connection that was idle for 30 s (nemo_gym/server_utils.py, timeout_keep_alive), often
# while the policy generates. A connection reused at that very moment would look like a crash of the server.
_KEEPALIVE_S = 10.0
_CONNECT_TIMEOUT_S = 10.0


class ActionName(StrEnum):
    """The five actions of the policy."""

    OBSERVE = "observe"
    NAVIGATE = "navigate"
    CLICK = "click"
    TYPE = "type"
    FINISH = "finish"


@dataclass(frozen=True)
class BrowserAction:
    """One action and the arguments that it needs; the others stay None."""

    name: ActionName
    url: str | None = None
    element_id: int | None = None
    text: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What one action led to."""

    observation: str
    """The page as the server shows it; empty after an error and after finish."""
    done: bool
    error: str | None
    """The server's text when the action failed; for the policy to read unless the failure is fatal."""
    failure: Failure | None
    elapsed_s: float


@dataclass(frozen=True)
class Verdict:
    """The environment's own score of an episode. `reward` is None exactly when `failure` is not."""

    reward: float | None
    failure: Failure | None
    elapsed_s: float


@dataclass(frozen=True)
class _Answer:
    """A 200 answer's object, or the failure that took its place."""

    content: dict[str, Any]
    failure: Failure | None


_PATHS: Mapping[Call, str] = {
    Call.SEED: "/seed_session",
    Call.OBSERVE: "/browser_observe",
    Call.NAVIGATE: "/browser_navigate",
    Call.CLICK: "/browser_click",
    Call.TYPE: "/browser_type",
    Call.FINISH: "/browser_finish",
    Call.VERIFY: "/verify",
    Call.CLOSE: "/close_session",
}

# /verify answers 422 unless both parts are there. It scores the session and reads neither.
_VERIFY_BODY: Mapping[str, Any] = {
    "responses_create_params": {"input": ""},
    "response": {
        "id": "episode",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "tools": [],
    },
}


class BrowserSession:
    """One browser session, for one attempt of a rollout: `async with BrowserSession(settings, gate) as session`."""

    def __init__(
        self, settings: RecipeSettings, gate: EnvironmentGate, blocked_patterns: Iterable[str | re.Pattern[str]] = ()
    ) -> None:
        """Make a session; `blocked_patterns`, case ignored, tell a human check from a page of the site."""
        self._settings = settings
        self._gate = gate
        self._base_url = ""
        self._http: aiohttp.ClientSession | None = None
        self._lock = asyncio.Lock()
        self._shielded: asyncio.Task[_Answer] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._verdict: Verdict | None = None
        self._blocked_patterns = tuple(
            re.compile(p, re.IGNORECASE) if isinstance(p, str) else p for p in blocked_patterns
        )
        self._context = CallContext(Call.SEED)
        self._open_slot: int | None = None
        self._closed = False
        self.opened = False
        """The server answered the seed: a browser was opened."""
        self.last_call = ""
        """The last call that was made, seed to verify; empty before any. The close does not count."""
        self.failure: Failure | None = None
        """The first fatal failure of the session."""
        self.environment_s = 0.0
        """Seconds spent in calls of the environment."""
        self.waiting_s = 0.0
        """Seconds spent waiting at the gate."""
        self.exchanges: list[Exchange] | None = None
        """Every call and its answer, if somebody put a list here to have them kept."""

    async def __aenter__(self) -> Self:
        """Return the session once it may be open. Raises SettingsError when no address is set."""
        self._base_url = self._settings.require_environment_url()
        self._open_slot = await self._wait_at_gate(self._gate.take_open_slot())
        # unsafe=True: aiohttp's default jar drops the cookies of hosts that are IP addresses.
        self._http = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the session, whatever happened in it; a close that hangs goes on behind the rollout's back."""
        finishing = self._gate.keep(self._finish())
        # asyncio.wait leaves the task running at the timeout, and when this very call is cancelled.
        _, late = await asyncio.wait({finishing}, timeout=self._settings.close_timeout_s)
        if late:
            logger.warning("Session is not closed after %.0f s; left to the background", self._settings.close_timeout_s)

    async def seed(self, initial_url: str, verifier_metadata: Mapping[str, Any]) -> Failure | None:
        """Open a browser on the task's start page; return why that failed, or None.

        While the environment is down this waits at the gate, and a refused connection is asked for again.
        """
        body = {"initial_url": initial_url, "verifier_metadata": dict(verifier_metadata)}
        self._context = CallContext(Call.SEED, start_url=initial_url, blocked_patterns=self._blocked_patterns)
        gives_up_at = time.monotonic() + self._settings.outage_patience_s
        async with self._lock:
            if self.failure is not None:
                return self.failure
            while True:
                slot, answer = await self._wait_at_gate(self._gate.take_seed_slot())
                if answer is Pass.REFUSED:
                    break
                failure = (await self._shielded_call(Call.SEED, self._seed_in_slot(slot, body))).failure
                if failure is None or failure.kind is not FailureKind.ENVIRONMENT_UNREACHABLE:
                    return self._latch(failure)
                if answer is Pass.LAST_CHANCE or time.monotonic() > gives_up_at:
                    break
            patience_s = self._settings.outage_patience_s
            evidence = f"{self._base_url} was down for more than {patience_s:g} s (outage patience)"
            return self._latch(failure_of(FailureKind.ENVIRONMENT_DOWN, evidence))

    async def act(self, action: BrowserAction) -> StepResult:
        """Return what one action led to. After a fatal failure: that failure again, without asking the server."""
        started = time.monotonic()
        async with self._lock:
            if self.failure is not None:
                return StepResult("", False, self.failure.evidence, self.failure, 0.0)
            call = Call(action.name.value)
            self._note_action(action)
            answer = await self._timed(call, self._call(call, _action_body(action), self._settings.act_timeout_s))
            result = self._step_result(answer, self._context.for_call(call), time.monotonic() - started)
            self._latch(result.failure)
            if self.failure is not None:
                # At once and not at the end of the rollout: it is what frees a session whose observe never answers.
                self._closing = self._gate.keep(self._close())
            return result

    async def verify(self) -> Verdict:
        """Return the environment's score; asked again, the same verdict, since the server scores a session once.

        A fatal failure for which the policy is to blame is scored 0 and is no failure of the measurement: breaking
        one's own browser must not be a way out of a bad rollout.
        """
        started = time.monotonic()
        async with self._lock:
            if self._verdict is None:
                if self.failure is None:
                    reward, failure = await self._score()
                    self._latch(failure)
                if self.failure is not None:
                    blamed = self.failure.fault is Fault.POLICY
                    reward, failure = (0.0, None) if blamed else (None, self.failure)
                self._verdict = Verdict(reward, failure, time.monotonic() - started)
            return self._verdict

    async def _score(self) -> tuple[float | None, Failure | None]:
        slot = await self._wait_at_gate(self._gate.take_verify_slot())
        answer = await self._shielded_call(Call.VERIFY, self._verify_in_slot(slot))
        failure = answer.failure or classify_verdict(answer.content, self._context.for_call(Call.VERIFY))
        return (None, failure) if failure else (float(answer.content["reward"]), None)

    def _latch(self, failure: Failure | None) -> Failure | None:
        """Keep a fatal failure, the first one since no call is made after it; return what was given."""
        if failure is not None and failure.fatal:
            self.failure = failure
        return failure

    def _note_action(self, action: BrowserAction) -> None:
        if action.name is not ActionName.OBSERVE:
            self._context = self._context.after_action(url=action.url, text=action.text)

    def _step_result(self, answer: _Answer, context: CallContext, elapsed_s: float) -> StepResult:
        """Return the answer as a step; a page that was shown settles where the policy is."""
        if answer.failure is not None:
            return StepResult("", False, answer.failure.evidence, answer.failure, elapsed_s)
        content = answer.content
        observation, done, error = content.get("observation"), content.get("done", False), content.get("error")
        if not isinstance(observation, str) or not isinstance(done, bool) or not isinstance(error, str | None):
            failure = failure_of(FailureKind.MALFORMED_ANSWER, f"{context.call}: {json.dumps(content)}")
            return StepResult("", False, failure.evidence, failure, elapsed_s)
        failure = classify_error(error, context) if error else classify_observation(observation, context)
        if failure is None and observation:
            self._context = self._context.after_page()
        return StepResult(observation, done, error, failure, elapsed_s)

    async def _shielded_call(self, call: Call, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Return the answer to a seed or a verify, which runs to its end even if this call is cancelled."""
        self._shielded = self._gate.keep(work)
        return await self._timed(call, asyncio.shield(self._shielded))

    async def _seed_in_slot(self, slot: int, body: dict[str, Any]) -> _Answer:
        """Seed, and tell the gate what that says of the environment; here, since the caller may be gone by then."""
        answer = None
        try:
            answer = await self._call(Call.SEED, body, self._settings.seed_timeout_s)
            self.opened = answer.failure is None
            return answer
        finally:
            if answer is None:
                self._gate.free_seed_slot(slot)
            else:
                self._gate.note_seed(slot, answer.failure)

    async def _verify_in_slot(self, slot: int) -> _Answer:
        try:
            answer = await self._call(Call.VERIFY, dict(_VERIFY_BODY), self._settings.verify_timeout_s)
            self._closed = answer.failure is None  # an answered verify has closed the browser
            return answer
        finally:
            self._gate.free_verify_slot(slot)

    async def _call(self, call: Call, body: dict[str, Any], timeout_s: float) -> _Answer:
        """Return the answer to one call; every way to fail comes back as a classified failure."""
        context = self._context.for_call(call)
        if call is not Call.CLOSE:
            self.last_call = str(call)
        exchange = Exchange(_PATHS[call], body)
        if self.exchanges is not None:
            self.exchanges.append(exchange)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http.post(self._base_url + _PATHS[call], json=body, allow_redirects=False) as response:
                    text = await response.text()
            exchange.answered(response.status, text, response.headers)
            if response.status != 200:
                retry_after = response.headers.get("Retry-After")
                return _Answer({}, classify_status(response.status, text, context, retry_after=retry_after))
            content = json.loads(text)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            exchange.failed(error)
            return _Answer({}, classify_exception(error, context))
        if not isinstance(content, dict):
            return _Answer({}, failure_of(FailureKind.MALFORMED_ANSWER, f"{call}: not an object: {text}"))
        return _Answer(content, None)

    async def _finish(self) -> None:
        """Close the session after the seed or verify that may still be under way, then free the open slot."""
        try:
            if self._shielded is not None:
                await asyncio.wait({self._shielded})
            if self._closing is None:
                self._closing = self._gate.keep(self._close())
            await asyncio.wait({self._closing})
        finally:
            await self._http.close()
            self._gate.free_open_slot(self._open_slot, closed=self.opened and self._closed)

    async def _close(self) -> None:
        answer = await self._call(Call.CLOSE, {}, self._settings.close_timeout_s)
        self._closed = self._closed or answer.failure is None
        if answer.failure is not None:
            logger.warning("Session could not be closed: %s", answer.failure.evidence)

    async def _timed(self, call: Call, work: Coroutine[Any, Any, _Answer] | asyncio.Future[_Answer]) -> _Answer:
        """Return the answer and count its time. A call that the caller gives up on is still under way in the server:
        its failure is latched, so that no second call follows it on the same cookie."""
        started = time.monotonic()
        try:
            return await work
        except asyncio.CancelledError:
            self._latch(classify_exception(TimeoutError("the caller gave up on it"), self._context.for_call(call)))
            raise
        finally:
            self.environment_s += time.monotonic() - started

    async def _wait_at_gate(self, work: Coroutine[Any, Any, Any]) -> Any:
        started = time.monotonic()
        try:
            return await work
        finally:
            self.waiting_s += time.monotonic() - started


def _action_body(action: BrowserAction) -> dict[str, Any]:
    """Return the request body of an action: its arguments that are set, in text that JSON and UTF-8 can carry.

    JSON lets the policy write half a surrogate pair; the server fails to echo such text and answers 500, which would
    count as the environment's failure.
    """
    fields = {"url": action.url, "element_id": action.element_id, "text": action.text, "answer": action.answer}
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in fields.items()
        if value is not None
    }
