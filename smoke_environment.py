"""One episode over the environment's HTTP contract without a policy: seed, observe, act, verify, close.

    python smoke_environment.py --url http://HOST:PORT     exit 0: healthy; 1: unhealthy; 2: wrong usage
    python smoke_environment.py --replay FILE              serves a recorded attempt: episode_replay.py

By default the episode runs on the page that the released server ships: it opens site/index.html, clicks `Go to form`,
finishes, and expects the server to score the form's address with 1.0. With --initial-url it opens that page, observes
and finishes, and expects the score 1.0 for having a page open at all. It speaks HTTP by itself rather than through
environment_session.py, whose sessions wait out an outage and hide the answers that a person wants to see here.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

import episode_replay
from recipe_settings import RecipeSettings, SettingsError
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
from rollout_rows import start_page_problem

SHIPPED_PAGE = "site/index.html"
SHIPPED_LINK = "Go to form"
SHIPPED_TARGET = "form.html"
CONNECT_S = 10.0
CLOSE_S = 10.0
"""Longest wait for the close, which comes even after --timeout has run out: an open browser costs the server memory."""

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

_HUNG = (
    "The address takes connections but does not answer. Look for a hung server process or browser; if the server is "
    "only slow, free its CPU or raise --timeout. A seed that was given up on keeps a browser open until the server "
    "is restarted."
)
_WRONG_SERVER = (
    "This does not speak the contract of NeMo Gym's interactive_browser server. Check that the address is the "
    "resources server's own, not a head server's or a proxy's, and that its release is the one in REQUIRED_VERL.txt."
)
_LAUNCH = (
    "In the server's own Python environment run `playwright install --with-deps chromium`, or point "
    "PLAYWRIGHT_BROWSERS_PATH at an installed one, and restart the server. In a container, look also at the memory "
    "limit, the size of /dev/shm, and whether Chromium is started as root without --no-sandbox."
)
ADVICE = {
    FailureKind.ENVIRONMENT_UNREACHABLE: (
        "Nothing takes connections at this address. Start the server, check host and port, and from another machine "
        "check that the server does not listen on 127.0.0.1 alone and that no firewall stands between."
    ),
    FailureKind.BROWSER_LAUNCH_FAILED: f"The server runs, but its Chromium can't start. {_LAUNCH}",
    FailureKind.SERVER_ERROR: (
        "The server runs, but this call failed inside it: its log at this moment says where. "
        f"If the answer speaks of Playwright or Chromium: {_LAUNCH}"
    ),
    FailureKind.START_PAGE_FAILED: (
        "The browser works but could not open the start page. From the server's machine, fetch that address with curl."
    ),
    FailureKind.PAGE_BLOCKED: (
        "The site shows a human check instead of its page: it takes the server's machine for a bot. Let the browser go "
        "out by another address, or leave this site's tasks out of the dataset."
    ),
    FailureKind.SEED_TIMEOUT: _HUNG,
    FailureKind.ACT_TIMEOUT: _HUNG,
    FailureKind.VERIFY_TIMEOUT: _HUNG,
    FailureKind.REQUEST_REJECTED: _WRONG_SERVER,
    FailureKind.MALFORMED_ANSWER: _WRONG_SERVER,
    FailureKind.ENVIRONMENT_DISCONNECTED: (
        "The server dropped the connection: it may be restarting or out of memory. Look at its log and try again."
    ),
    FailureKind.SESSION_LOST: (
        "The server does not know the session that it has just opened. It must run as one process (num_workers: 1), "
        "and a load balancer before it must keep each cookie on one server."
    ),
}
DEFAULT_ADVICE = "Look at the server's log at this moment; the answer above is all that it told the client."


class StepFailed(Exception):
    """A step whose answer is no healthy one; args: the Failure, the server's answer as it came."""


@dataclass(frozen=True)
class Step:
    """One step of the episode, as it went."""

    name: str
    ok: bool
    elapsed_s: float
    detail: str


@dataclass
class Report:
    """The check's outcome; filled while the episode runs."""

    url: str
    checked: str
    """What a healthy answer stands for."""
    steps: list[Step] = field(default_factory=list)
    failed_step: str | None = None
    """The first step that failed; None when healthy."""
    kind: str = ""
    answered: str = ""
    advice: str = ""

    @property
    def healthy(self) -> bool:
        """Whether every step went well."""
        return self.failed_step is None

    def fail(self, step: str, failure: Failure, answered: str) -> None:
        """Note a failed step; the first one counts, since a failed close after it is only its echo."""
        if self.failed_step is None:
            self.failed_step, self.kind, self.answered = step, str(failure.kind), answered
            self.advice = ADVICE.get(failure.kind, DEFAULT_ADVICE)

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines."""
        steps = [
            {"step": s.name, "ok": s.ok, "elapsed_s": round(s.elapsed_s, 3), "detail": s.detail} for s in self.steps
        ]
        failure = {"step": self.failed_step, "kind": self.kind, "answered": self.answered, "advice": self.advice}
        verdict = {"healthy": self.healthy, "url": self.url, "checked": self.checked}
        return {**verdict, "steps": steps, "failure": None if self.healthy else failure}


class Smoke:
    """One check: the HTTP session, its deadline and the report."""

    def __init__(self, http: aiohttp.ClientSession, report: Report, start_page: str, timeout_s: float, say: Callable):
        self.http = http
        self.report = report
        self.start_page = start_page
        self.deadline = time.monotonic() + timeout_s
        self.say = say

    async def step(self, name: str, work: Awaitable[tuple[str, Any]]) -> Any:
        """Return what a step brings, after noting how it went. Raises StepFailed."""
        started = time.monotonic()
        try:
            detail, value = await work
        except StepFailed as e:
            failure, answered = e.args
            # The report gives the first failure's answer in full; a later one, of the close, has only this line.
            detail = str(failure.kind) if self.report.healthy else f"{failure.kind}: {answered}"
            self.report.fail(name, failure, answered)
            self._note(Step(name, False, time.monotonic() - started, detail))
            raise
        self._note(Step(name, True, time.monotonic() - started, detail))
        return value

    def _note(self, step: Step) -> None:
        self.report.steps.append(step)
        self.say(f"{step.name:<8} {'ok' if step.ok else 'FAILED':<6} {step.elapsed_s:7.3f} s  {step.detail}")

    async def post(self, call: Call, path: str, body: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Return the JSON object that one call answers. Raises StepFailed on anything else."""
        context = CallContext(call, start_url=self.start_page)
        left_s = max(self.deadline - time.monotonic(), 0.001) if limit_s is None else limit_s
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
        answer = await self.post(Call.CLOSE, "/close_session", {}, limit_s=CLOSE_S)
        if answer.get("closed") is not True:
            raise _unexpected(Call.CLOSE, answer, "not `closed: true`")
        return "closed", None

    async def run(self) -> None:
        """Play the episode; the report says how it went. A session that was opened is closed whatever happens."""
        shipped = self.start_page == SHIPPED_PAGE
        try:
            await self.step("seed", self.seed({"url_contains": SHIPPED_TARGET if shipped else "://"}))
        except StepFailed:
            return  # no cookie came back, so there is no session that a close could name
        try:
            observation = await self.step("observe", self.observe())
            if shipped:
                await self.step("click", self.click_link(observation))
            await self.step("finish", self.finish())
            await self.step("verify", self.verify())
        except StepFailed:
            pass  # noted in the report by step(); the close below still has to happen
        finally:
            try:
                await self.step("close", self.close())
            except StepFailed:
                pass  # noted in the report by step()


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


async def check(url: str, start_page: str, timeout_s: float, say: Callable[[str], None]) -> Report:
    """Return the report of one episode against the server at `url`; takes at most `timeout_s` and one close."""
    did = f"clicked `{SHIPPED_LINK}`, finished and scored" if start_page == SHIPPED_PAGE else "finished and scored"
    report = Report(url, f"opened {start_page}, observed, {did}")
    # unsafe: aiohttp's default jar drops the cookies of hosts that are named by their IP address.
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        await Smoke(http, report, start_page, timeout_s, say).run()
    return report


def _parsed(argv: list[str] | None) -> tuple[argparse.Namespace, str]:
    """Return the arguments and the server's address; leaves with exit code 2 on wrong usage."""
    parser = argparse.ArgumentParser(
        prog="smoke_environment.py",
        description="Run one episode against a live interactive_browser server.",
        epilog="--replay FILE [--port P] serves a recorded attempt instead.",
    )
    parser.add_argument("--url", help="the server's address (default: NEMO_GYM_URL)")
    parser.add_argument("--initial-url", default=SHIPPED_PAGE, metavar="U", help="observe this page and finish")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds for the check (default 180)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line per step")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.timeout < float("inf"):
        parser.error(f"--timeout {arguments.timeout}: must be a number of seconds above 0")
    problem = start_page_problem(arguments.initial_url)
    if problem:
        parser.error(f"--initial-url {problem[0]}: {problem[1]}")
    try:
        settings = RecipeSettings(environment_url=arguments.url) if arguments.url else RecipeSettings.from_env()
        return arguments, settings.require_environment_url()
    except SettingsError as e:
        parser.error(f"no usable address ({'--url ' + repr(arguments.url) if arguments.url else 'no --url'}). {e}")


def main(argv: list[str] | None = None) -> int:
    """Run the check and print it. Return 0 when healthy, 1 when not; wrong usage exits with 2."""
    given = sys.argv[1:] if argv is None else argv
    if any(text.partition("=")[0] == "--replay" for text in given):
        return episode_replay.main(given)
    arguments, url = _parsed(argv)

    def say(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)

    try:
        report = asyncio.run(check(url, arguments.initial_url, arguments.timeout, say))
    except KeyboardInterrupt:
        print("Stopped before the check was over.", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(report.as_json()))
    elif report.healthy:
        print(f"healthy: {url} ({report.checked})")
    else:
        print(f"unhealthy: step `{report.failed_step}` failed at {url} ({report.kind})")
        print(f"  answered: {report.answered}\n  what to do: {report.advice}")
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
