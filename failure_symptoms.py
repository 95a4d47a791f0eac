"""What a failure looks like: the closed set of kinds, and the one table from symptom to kind.

A row of SYMPTOMS says: on these calls, a text of this channel that matches means this kind, perhaps only given further
evidence. What follows from a kind (whose fault, whether to try again) is in rollout_failures.py, which looks both up.

Source: nemo-gym 0.7.0, resources_servers/interactive_browser/app.py and browser/page.py; Playwright 1.62 for the
wording of its errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit


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
    PAGE_BLOCKED = "page_blocked"
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
    # The judge gave no verdict.
    JUDGE_UNREACHABLE = "judge_unreachable"
    JUDGE_REJECTED = "judge_rejected"
    JUDGE_UNPARSEABLE = "judge_unparseable"
    JUDGE_REFUSED = "judge_refused"
    JUDGE_TRUNCATED = "judge_truncated"
    # Found by the agent loop.
    ENGINE_ERROR = "engine_error"
    EPISODE_DEADLINE = "episode_deadline"
    PROMPT_TOO_LONG = "prompt_too_long"
    ROWS_NOT_PLANNED = "rows_not_planned"
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
class CallContext:
    """What blame depends on besides the symptom itself."""

    call: Call
    start_url: str | None = None
    """The task's own start page."""
    policy_url: str | None = None
    """Address that the policy last navigated to, while no page has been observed since; None otherwise."""
    acted: bool = False
    """The policy has done something to the page since the seed."""
    blocked_patterns: tuple[re.Pattern[str], ...] = ()
    """What tells a human check from a page of the site; none: no page is taken for one."""
    said: str = ""
    """All text that the policy typed and all addresses that it navigated to in this session, casefolded."""
    earlier_urls: tuple[str, ...] = ()
    """Addresses that the policy navigated to before policy_url, since a page was last observed."""

    def for_call(self, call: Call) -> CallContext:
        """Return what is known, for another call."""
        return replace(self, call=call)

    def after_action(self, *, url: str | None = None, text: str | None = None) -> CallContext:
        """Return what is known once the policy did something; `url` is where it navigates to, `text` what it types."""
        said = "\n".join([self.said, *(part.casefold() for part in (url, text) if part)])
        known = replace(self, acted=True, said=said)
        if url is None:
            return known
        earlier = (*self.earlier_urls, self.policy_url) if self.policy_url is not None else self.earlier_urls
        return replace(known, policy_url=url, earlier_urls=earlier)

    def after_page(self) -> CallContext:
        """Return what is known once a page was observed: where the policy went before explains nothing any more."""
        return replace(self, policy_url=None, earlier_urls=())


class Channel(StrEnum):
    """Where a symptom shows; the text that SYMPTOMS is matched against differs by channel."""

    STATUS = "status"  # "<status> <body>" of an answer that is not 200
    ERROR = "error"  # the `error` of a 200 answer to an action
    PAGE = "page"  # the URL that an observation shows; blocked pages are told by configurable patterns instead
    REASON = "failure_reason"  # of /verify
    GYM_KIND = "failure_kind"  # of /verify, NeMo Gym's own vocabulary
    EXCEPTION = "exception"  # "<class> <its bases>: <message>" of what the HTTP client raised


_ACTS = frozenset({Call.OBSERVE, Call.NAVIGATE, Call.CLICK, Call.TYPE, Call.FINISH})
_ANY = frozenset(Call)
_SEED = frozenset({Call.SEED})
_VERIFY = frozenset({Call.VERIFY})


def _browser_page(context: CallContext) -> bool:
    """Whether the policy went to one of the browser's own pages, such as chrome://crash, and has seen no page since."""
    own_page = re.compile(r"(?i)\s*(view-source:)?((chrome|chrome-untrusted|devtools):|about:(?!blank))")
    return any(own_page.match(url) for url in (context.policy_url or "", *context.earlier_urls))


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
# Words of browser providers and of the proxies in front of them, told inside an error of another status than 429.
_FULL = (
    r"(?i:too many (requests|connections|((concurrent|active|open|running) )*(sessions|browsers))"
    r"|quota|\brate.?limit|\b429\b|no (free|available) (sessions?|slots?|browsers?)|(at|over|insufficient) capacity"
    r"|(session|concurren\w+|browser)s? limit|limit of \d+ ((concurrent|active|open) )*(sessions|browsers)"
    r"|max(imum)?( number of)? ((concurrent|active|open) )*(sessions|browsers))"
)
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
        (_SEED, r'^422|^5\d\d "?\d+ validation errors? for ', FailureKind.TASK_DATA_ERROR),
        (
            _SEED,
            r"^5\d\d .*Page\.goto: .*(Cannot navigate to invalid URL|ERR_INVALID_URL)",
            FailureKind.TASK_DATA_ERROR,
        ),
        (_SEED, rf"^5\d\d .*Page\.goto: {_DEAD_BROWSER}", FailureKind.BROWSER_DIED),
        (_SEED, r"^5\d\d .*Page\.goto", FailureKind.START_PAGE_FAILED),
        # Behind the pages' errors, whose addresses may hold such a word.
        (_SEED, rf"^(402|403|409|5\d\d) .*{_FULL}", FailureKind.PROVIDER_FULL),
        (_SEED, rf"^5\d\d .*({_LAUNCH})", FailureKind.BROWSER_LAUNCH_FAILED),
        (_SEED, r"^5\d\d .*Timeout \d+ms", FailureKind.START_PAGE_FAILED),
        (_SEED, rf"^5\d\d .*{_DEAD_BROWSER}", FailureKind.BROWSER_LAUNCH_FAILED),
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
