"""The taxonomy of what can go wrong in a rollout: which failures exist, whose fault each is, and how to tell.

Two tables hold all of it. TRAITS says for each kind whose fault it is, whether a fresh attempt can help and whether
the attempt can go on. SYMPTOMS says which kind a symptom stands for; the `classify_*` functions only look it up.
A symptom that no row knows is `unclassified`: kept out of training, never guessed to be a zero.

Blame follows the cause, so that a policy can't get out of a bad rollout by breaking something: an address that the
policy made up is the policy's, the task's own site refusing connections is the environment's.

Source: nemo-gym 0.7.0, resources_servers/interactive_browser/app.py and browser/page.py; Playwright 1.62 for the
wording of its errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

EVIDENCE_CHARS = 300


class Fault(StrEnum):
    """Whose doing a failure is."""

    ENVIRONMENT = "environment"  # the browser, its server, the site under test, the inference engine
    POLICY = "policy"  # what the policy asked for
    MEASUREMENT = "measurement"  # neither: the task's data, the scoring, or a symptom that nobody knows


class FailureKind(StrEnum):
    """The closed set of failures; `failure_kind` in the rows and in the metrics is one of these or empty."""

    # The environment can't be reached or is breaking down.
    ENVIRONMENT_DOWN = "environment_down"
    ENVIRONMENT_UNREACHABLE = "environment_unreachable"
    ENVIRONMENT_DISCONNECTED = "environment_disconnected"
    ENVIRONMENT_SHUTDOWN = "environment_shutdown"
    SERVER_ERROR = "server_error"
    PROVIDER_FULL = "provider_full"
    MALFORMED_ANSWER = "malformed_answer"
    SEED_TIMEOUT = "seed_timeout"
    ACT_TIMEOUT = "act_timeout"
    VERIFY_TIMEOUT = "verify_timeout"
    # The session or its browser is gone.
    SESSION_LOST = "session_lost"
    BROWSER_LAUNCH_FAILED = "browser_launch_failed"
    BROWSER_DIED = "browser_died"
    BROWSER_CRASHED_BY_POLICY = "browser_crashed_by_policy"
    # The site under test.
    START_PAGE_FAILED = "start_page_failed"
    SITE_DOWN = "site_down"
    DEAD_LINK = "dead_link"
    CLICK_STILL_LOADING = "click_still_loading"
    PAGE_CHANGED = "page_changed"
    # What the policy asked for can't be done.
    BAD_ELEMENT = "bad_element"
    ELEMENT_NOT_USABLE = "element_not_usable"
    BAD_URL = "bad_url"
    NAVIGATION_FAILED = "navigation_failed"
    HUNG_BY_POLICY = "hung_by_policy"
    ACTION_REJECTED = "action_rejected"
    # The reward is not a measurement.
    TASK_DATA_ERROR = "task_data_error"
    REQUEST_REJECTED = "request_rejected"
    SCORING_FAILED = "scoring_failed"
    REWARD_MASKED = "reward_masked"
    # Found by the agent loop.
    ENGINE_ERROR = "engine_error"
    EPISODE_DEADLINE = "episode_deadline"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNCLASSIFIED = "unclassified"


class Call(StrEnum):
    """The calls of the environment's HTTP contract."""

    SEED = "seed"
    OBSERVE = "observe"
    NAVIGATE = "navigate"
    CLICK = "click"
    TYPE = "type"
    FINISH = "finish"
    VERIFY = "verify"
    CLOSE = "close"


@dataclass(frozen=True)
class Failure:
    """One failure of a rollout, classified."""

    kind: FailureKind
    fault: Fault
    retryable: bool
    """A fresh attempt of the same rollout may succeed."""
    fatal: bool
    """This attempt can't go on; if not, the policy reads the server's text and carries on."""
    evidence: str
    """Excerpt of what was seen, at most EVIDENCE_CHARS characters."""


@dataclass(frozen=True)
class CallContext:
    """What blame depends on besides the symptom itself."""

    call: Call
    start_url: str | None = None
    """The task's own start page."""
    policy_url: str | None = None
    """Address that the policy last navigated to, while no page has been observed since; None otherwise."""
    acted: bool = False
    """The policy has done something to the page since the seed."""


@dataclass(frozen=True)
class Traits:
    """What follows from a kind."""

    fault: Fault
    retryable: bool
    fatal: bool


_BROKEN_ENVIRONMENT = Traits(Fault.ENVIRONMENT, retryable=True, fatal=True)
_PASSING_TROUBLE = Traits(Fault.ENVIRONMENT, retryable=False, fatal=False)
_POLICY_MISTAKE = Traits(Fault.POLICY, retryable=False, fatal=False)
_POLICY_WRECKED_IT = Traits(Fault.POLICY, retryable=False, fatal=True)
_NO_MEASUREMENT = Traits(Fault.MEASUREMENT, retryable=False, fatal=True)

TRAITS: Mapping[FailureKind, Traits] = MappingProxyType(
    {
        # Not retryable: the gate has already waited as long as the settings allow.
        FailureKind.ENVIRONMENT_DOWN: Traits(Fault.ENVIRONMENT, retryable=False, fatal=True),
        FailureKind.ENVIRONMENT_UNREACHABLE: _BROKEN_ENVIRONMENT,
        FailureKind.ENVIRONMENT_DISCONNECTED: _BROKEN_ENVIRONMENT,
        FailureKind.ENVIRONMENT_SHUTDOWN: _BROKEN_ENVIRONMENT,
        FailureKind.SERVER_ERROR: _BROKEN_ENVIRONMENT,
        FailureKind.PROVIDER_FULL: _BROKEN_ENVIRONMENT,
        FailureKind.MALFORMED_ANSWER: _BROKEN_ENVIRONMENT,
        FailureKind.SEED_TIMEOUT: _BROKEN_ENVIRONMENT,
        FailureKind.ACT_TIMEOUT: _BROKEN_ENVIRONMENT,
        FailureKind.VERIFY_TIMEOUT: _BROKEN_ENVIRONMENT,
        FailureKind.SESSION_LOST: _BROKEN_ENVIRONMENT,
        FailureKind.BROWSER_LAUNCH_FAILED: _BROKEN_ENVIRONMENT,
        FailureKind.BROWSER_DIED: _BROKEN_ENVIRONMENT,
        FailureKind.BROWSER_CRASHED_BY_POLICY: _POLICY_WRECKED_IT,
        FailureKind.START_PAGE_FAILED: _BROKEN_ENVIRONMENT,
        FailureKind.SITE_DOWN: _BROKEN_ENVIRONMENT,
        FailureKind.DEAD_LINK: _PASSING_TROUBLE,
        FailureKind.CLICK_STILL_LOADING: _PASSING_TROUBLE,
        FailureKind.PAGE_CHANGED: _PASSING_TROUBLE,
        FailureKind.BAD_ELEMENT: _POLICY_MISTAKE,
        FailureKind.ELEMENT_NOT_USABLE: _POLICY_MISTAKE,
        FailureKind.BAD_URL: _POLICY_MISTAKE,
        FailureKind.NAVIGATION_FAILED: _POLICY_MISTAKE,
        FailureKind.HUNG_BY_POLICY: _POLICY_WRECKED_IT,
        FailureKind.ACTION_REJECTED: _POLICY_MISTAKE,
        FailureKind.TASK_DATA_ERROR: _NO_MEASUREMENT,
        FailureKind.REQUEST_REJECTED: _NO_MEASUREMENT,
        FailureKind.SCORING_FAILED: Traits(Fault.MEASUREMENT, retryable=True, fatal=True),
        FailureKind.REWARD_MASKED: Traits(Fault.MEASUREMENT, retryable=True, fatal=True),
        FailureKind.ENGINE_ERROR: _BROKEN_ENVIRONMENT,
        # Not retryable: no time is left for another attempt.
        FailureKind.EPISODE_DEADLINE: Traits(Fault.ENVIRONMENT, retryable=False, fatal=True),
        FailureKind.PROMPT_TOO_LONG: _NO_MEASUREMENT,
        FailureKind.UNCLASSIFIED: _NO_MEASUREMENT,
    }
)


class Channel(StrEnum):
    """Where a symptom shows; the text that SYMPTOMS is matched against differs by channel."""

    STATUS = "status"  # "<status> <body>" of an answer that is not 200
    ERROR = "error"  # the `error` of a 200 answer to an action
    PAGE = "page"  # the URL that an observation shows
    REASON = "failure_reason"  # of /verify
    GYM_KIND = "failure_kind"  # of /verify, NeMo Gym's own vocabulary
    EXCEPTION = "exception"  # "<class> <its bases>: <message>" of what the HTTP client raised


_ACTS = frozenset({Call.OBSERVE, Call.NAVIGATE, Call.CLICK, Call.TYPE, Call.FINISH})
_ANY = frozenset(Call)
_SEED = frozenset({Call.SEED})
_VERIFY = frozenset({Call.VERIFY})


def _browser_page(context: CallContext) -> bool:
    """Whether the policy went to one of the browser's own pages, such as chrome://crash."""
    return re.match(r"(?i)\s*((chrome|devtools):|about:(?!blank))", context.policy_url or "") is not None


def origin(url: str | None) -> tuple[str, str, int | None] | None:
    """Return (scheme, host, port) of an http or https address, or None for anything else."""
    try:
        parts = urlsplit((url or "").strip())
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port


def _own_site(context: CallContext) -> bool:
    """Whether the policy asked for the task's own site, scheme and port included: another port is an invention."""
    return origin(context.policy_url) is not None and origin(context.policy_url) == origin(context.start_url)


def _start_page(context: CallContext) -> bool:
    return _own_site(context) and _without_slash(context.policy_url) == _without_slash(context.start_url)


def _without_slash(url: str | None) -> str:
    return (url or "").strip().partition("#")[0].rstrip("/")


def _untouched(context: CallContext) -> bool:
    return not context.acted


def _navigated(context: CallContext) -> bool:
    return context.policy_url is not None


def _foreign_address(context: CallContext) -> bool:
    """Whether the policy went to another site than the task's; an address that no browser opens is not one."""
    return origin(context.policy_url) is not None and not _own_site(context)


@dataclass(frozen=True)
class Symptom:
    """One row of SYMPTOMS: on these calls, text of this channel that matches means this kind."""

    channel: Channel
    calls: frozenset[Call]
    pattern: str
    kind: FailureKind
    when: Callable[[CallContext], bool] | None = None
    """Further evidence that the row needs, or None."""


# Errors echo what the policy typed and what the page shows (in Playwright's call log, behind "at <address>"), so every
# pattern that blames the environment is anchored: a policy that types "Target crashed" must not look like a crash.
_FAILED = r"^\w+ failed: ([\w.]+: )?"
_DEAD_BROWSER = (
    r"(Target page, context or browser has been closed|Target crashed|Page crashed|Connection closed"
    r"|unable to perform operation on <[^\n]*the handler is closed)"
)
# Chromium's errors that depend on the host alone: no path on a living site brings them about.
_HOST_DOWN = (
    r"net::ERR_(CONNECTION_REFUSED|CONNECTION_TIMED_OUT|CONNECTION_CLOSED|NAME_NOT_RESOLVED|NAME_RESOLUTION_FAILED"
    r"|ADDRESS_UNREACHABLE|INTERNET_DISCONNECTED|NETWORK_CHANGED|PROXY_CONNECTION_FAILED)"
)
# Errors of a page rather than of its host; the policy chose the page, unless it is the task's own start page.
_PAGE_DOWN = r"(net::ERR_(EMPTY_RESPONSE|CONNECTION_RESET|HTTP_RESPONSE_CODE_FAILURE)|Timeout )"
_BAD_URL = (
    r"(net::ERR_(ABORTED|INVALID_URL|UNSAFE_PORT|UNKNOWN_URL_SCHEME|DISALLOWED_URL_SCHEME|FILE_NOT_FOUND|ACCESS_DENIED"
    r"|BLOCKED_BY_\w+)|Protocol error|Download is starting)"
)
_PAGE_CHANGED = (
    r"(Execution context was destroyed|Cannot find context|Frame (was|has been|got) detached|Navigation to [^\n]* is "
    r"interrupted by another navigation)"
)
_LAUNCH = (
    r"BrowserType\.|Could not install Playwright Chromium|ECONNREFUSED|Executable doesn't exist|BrowserSessionError"
    r"|static_cdp"
)
_FULL = r"(?i:too many (concurrent |active |open )*sessions|quota|rate limit)"
_UNSCORED = r"^browser unreachable while scoring: "


def _rows(channel: Channel, *rows: tuple[Any, ...]) -> tuple[Symptom, ...]:
    return tuple(Symptom(channel, *row) for row in rows)


def _raised(*class_names: str) -> str:
    """Return the pattern of an exception that is, or derives from, one of these classes."""
    return rf"^[^:]*\b({'|'.join(class_names)})\b"


# The first row that fits wins, so a special case stands above the general one.
SYMPTOMS: tuple[Symptom, ...] = (
    *_rows(
        Channel.STATUS,
        (_ANY, r"^(429|503)", FailureKind.PROVIDER_FULL),
        (_ANY, r'^5\d\d "?Request was cancelled"?$', FailureKind.ENVIRONMENT_SHUTDOWN),
        (_SEED, r"^422|^5\d\d .*validation error", FailureKind.TASK_DATA_ERROR),
        (
            _SEED,
            r"^5\d\d .*Page\.goto: .*(Cannot navigate to invalid URL|ERR_INVALID_URL)",
            FailureKind.TASK_DATA_ERROR,
        ),
        (_SEED, r"^5\d\d .*(Page\.goto|Timeout \d+ms)", FailureKind.START_PAGE_FAILED),
        (_SEED, rf"^5\d\d .*{_FULL}", FailureKind.PROVIDER_FULL),
        (_SEED, rf"^5\d\d .*({_LAUNCH}|{_DEAD_BROWSER})", FailureKind.BROWSER_LAUNCH_FAILED),
        (_VERIFY, r"^5\d\d .*no supported scoring key", FailureKind.TASK_DATA_ERROR),
        (_ANY, r"^(5\d\d|408)", FailureKind.SERVER_ERROR),
        # The policy chooses what an action carries, the recipe chooses the path: a refused body is the policy's.
        (_ACTS, r"^(400|413|422)", FailureKind.ACTION_REJECTED),
        (_ANY, r"^[34]\d\d", FailureKind.REQUEST_REJECTED),
    ),
    *_rows(
        Channel.ERROR,
        (_ANY, r"^no active session; seed_session must be called first$", FailureKind.SESSION_LOST),
        (_ANY, r"^\w+ failed: backend is not open", FailureKind.SESSION_LOST),
        (_ANY, _FAILED + _DEAD_BROWSER, FailureKind.BROWSER_CRASHED_BY_POLICY, _browser_page),
        (_ANY, _FAILED + _DEAD_BROWSER, FailureKind.BROWSER_DIED),
        (_ANY, r"^\w+ failed: 'element_id -?\d+ not in last observation", FailureKind.BAD_ELEMENT),
        (_ANY, _FAILED + r".*not attached to the DOM", FailureKind.BAD_ELEMENT),
        (_ANY, _FAILED + _PAGE_CHANGED, FailureKind.PAGE_CHANGED),
        (_ANY, r"(?s)^click failed: .*Timeout.*click action done.*scheduled navig", FailureKind.CLICK_STILL_LOADING),
        (_ANY, r"^\w+ failed: ElementHandle\.", FailureKind.ELEMENT_NOT_USABLE),
        (_ANY, _FAILED + _HOST_DOWN, FailureKind.SITE_DOWN, _own_site),
        (_ANY, _FAILED + _PAGE_DOWN, FailureKind.SITE_DOWN, _start_page),
        (_ANY, _FAILED + _BAD_URL, FailureKind.BAD_URL),
        (_ANY, r"^\w+ failed: Page\.goto: ", FailureKind.NAVIGATION_FAILED),
    ),
    *_rows(
        Channel.PAGE,
        (_ANY, r"^chrome-error:", FailureKind.START_PAGE_FAILED, _untouched),
        (_ANY, r"^chrome-error:", FailureKind.NAVIGATION_FAILED, _navigated),
        (_ANY, r"^chrome-error:", FailureKind.DEAD_LINK),
    ),
    *_rows(
        Channel.REASON,
        (_VERIFY, r"^browser session not found at verify$", FailureKind.SESSION_LOST),
        (_VERIFY, _UNSCORED + r"TypeError: 'in <string>'", FailureKind.TASK_DATA_ERROR),
        (_VERIFY, _UNSCORED + ".*" + _DEAD_BROWSER, FailureKind.BROWSER_CRASHED_BY_POLICY, _browser_page),
        (_VERIFY, _UNSCORED + ".*" + _DEAD_BROWSER, FailureKind.BROWSER_DIED),
        (_VERIFY, _UNSCORED, FailureKind.SCORING_FAILED),
    ),
    *_rows(  # the vocabulary of nemo_gym/failure_kinds.py
        Channel.GYM_KIND,
        (_VERIFY, r"^session_(lost|expired)$", FailureKind.SESSION_LOST),
        (_VERIFY, r"^provider_quota_exhausted$", FailureKind.PROVIDER_FULL),
        (_VERIFY, r"^provider_(unavailable|oom_killed)$", FailureKind.BROWSER_DIED),
        (_VERIFY, r"^transport_\w+$", FailureKind.ENVIRONMENT_DISCONNECTED),
        (_VERIFY, r"^(cancelled|kill_shaped|shutdown)$", FailureKind.ENVIRONMENT_SHUTDOWN),
        (_VERIFY, r"^(judge_\w+|verifier_error|cohort_incomplete)$", FailureKind.SCORING_FAILED),
    ),
    *_rows(  # class names of aiohttp and of the standard library, so that this module needs no aiohttp
        Channel.EXCEPTION,
        (_ANY, _raised("ClientConnectorError", "ConnectionTimeoutError"), FailureKind.ENVIRONMENT_UNREACHABLE),
        (_ANY, _raised("ConnectionRefusedError"), FailureKind.ENVIRONMENT_UNREACHABLE),
        (_SEED, _raised("TimeoutError"), FailureKind.SEED_TIMEOUT),
        (_ACTS | _VERIFY, _raised("TimeoutError"), FailureKind.HUNG_BY_POLICY, _foreign_address),
        (_VERIFY, _raised("TimeoutError"), FailureKind.VERIFY_TIMEOUT),
        (_ACTS, _raised("TimeoutError"), FailureKind.ACT_TIMEOUT),
        (_ANY, _raised("ClientConnectionError", "ConnectionError"), FailureKind.ENVIRONMENT_DISCONNECTED),
        (_ANY, _raised("ClientPayloadError"), FailureKind.ENVIRONMENT_DISCONNECTED),
        (_ANY, _raised("JSONDecodeError", "UnicodeDecodeError"), FailureKind.MALFORMED_ANSWER),
        (_ANY, _raised("ClientResponseError"), FailureKind.MALFORMED_ANSWER),
    ),
)


def failure_of(kind: FailureKind, evidence: str) -> Failure:
    """Return the failure of a kind that is already known, with the kind's traits."""
    traits = TRAITS[kind]
    return Failure(kind, traits.fault, traits.retryable, traits.fatal, excerpt(evidence))


def excerpt(text: str) -> str:
    """Return text on one line, cut visibly at EVIDENCE_CHARS characters."""
    line = " ".join(text.split())
    return line if len(line) <= EVIDENCE_CHARS else line[: EVIDENCE_CHARS - 3] + "..."


def _look_up(channel: Channel, text: str, context: CallContext) -> FailureKind:
    for row in SYMPTOMS:
        if row.channel is not channel or context.call not in row.calls or not re.search(row.pattern, text):
            continue
        if row.when is None or row.when(context):
            return row.kind
    return FailureKind.UNCLASSIFIED


def classify_status(status: int, body: str, context: CallContext) -> Failure:
    """Return the failure behind an HTTP answer whose status is not 200."""
    text = " ".join(f"{status} {body}".split())
    return failure_of(_look_up(Channel.STATUS, text, context), f"{context.call}: HTTP {text}")


def classify_error(error: str, context: CallContext) -> Failure:
    """Return the failure behind the `error` of a 200 answer to an action."""
    return failure_of(_look_up(Channel.ERROR, error, context), error)


def classify_observation(observation: str, context: CallContext) -> Failure | None:
    """Return the failure that an observation without `error` shows, or None for an ordinary page."""
    url = page_url(observation)
    if url is None or not url.startswith("chrome-error:"):
        return None
    return failure_of(_look_up(Channel.PAGE, url, context), f"the browser shows its error page: {url}")


def page_url(observation: str) -> str | None:
    """Return the address in the first line of an observation ("URL: ..."), or None where there is none."""
    first = observation.partition("\n")[0]
    return first.removeprefix("URL: ").strip() if first.startswith("URL: ") else None


def classify_exception(error: BaseException, context: CallContext) -> Failure:
    """Return the failure behind an exception of the HTTP client, told by the names of its classes."""
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    kind = _look_up(Channel.EXCEPTION, f"{names}: {error}", context)
    return failure_of(kind, f"{context.call}: {type(error).__name__}: {error}")


def classify_verdict(answer: Mapping[str, Any], context: CallContext) -> Failure | None:
    """Return why the reward in an answer of /verify is no measurement, or None if it is one.

    Honours `failure_reason` (all that interactive_browser sets), `mask_sample` (top level, and `instance_config`,
    where older NeMo Gym servers put it) and `failure_kind`. The text that says most is looked up first.
    """
    reason, gym_kind = answer.get("failure_reason"), answer.get("failure_kind")
    nested = answer.get("instance_config")
    masked = bool(answer.get("mask_sample")) or (isinstance(nested, Mapping) and bool(nested.get("mask_sample")))
    evidence = f"verify: mask_sample={masked} failure_kind={gym_kind} failure_reason={reason}"
    for channel, text in ((Channel.REASON, reason), (Channel.GYM_KIND, gym_kind)):
        kind = _look_up(channel, str(text), context) if text else FailureKind.UNCLASSIFIED
        if kind is not FailureKind.UNCLASSIFIED:
            return failure_of(kind, evidence)
    if masked:
        return failure_of(FailureKind.REWARD_MASKED, evidence)
    if reason or gym_kind:
        return failure_of(FailureKind.UNCLASSIFIED, evidence)
    reward = answer.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        return failure_of(FailureKind.MALFORMED_ANSWER, f"verify: reward is {reward!r}, not a finite number")
    return None
