"""Each symptom of the environment's contract, with its kind, whose fault it is, and what may be done about it."""

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest

from rollout_failures import (
    EVIDENCE_CHARS,
    TRAITS,
    Call,
    CallContext,
    FailureKind,
    Fault,
    classify_error,
    classify_exception,
    classify_observation,
    classify_status,
    classify_verdict,
    failure_of,
)

START = "http://shop.test/start"
ELSEWHERE = "http://made-up.test/"
NAVIGATING = '\nCall log:\n  - navigating to "x", waiting until "domcontentloaded"\n'

# Columns of the contract: whose fault, whether a fresh attempt may help, whether this attempt is over.
ENVIRONMENT = (Fault.ENVIRONMENT, True, True)
PASSING = (Fault.ENVIRONMENT, False, False)
POLICY = (Fault.POLICY, False, False)
POLICY_WRECK = (Fault.POLICY, False, True)
MEASUREMENT = (Fault.MEASUREMENT, False, True)
MEASUREMENT_AGAIN = (Fault.MEASUREMENT, True, True)


def columns(failure):
    return failure.fault, failure.retryable, failure.fatal


def context(call, policy_url=None, acted=True):
    return CallContext(call, START, policy_url, acted)


NO_SESSION = "no active session; seed_session must be called first"
CLOSED = "observe failed: Locator.count: Target page, context or browser has been closed"
CRASHED = "observe failed: Locator.count: Target crashed "
DRIVER = (
    "observe failed: Locator.count: unable to perform operation on <WriteUnixTransport closed=True reading=False "
    "0x7f99>; the handler is closed"
)
CLICKING = "\nCall log:\n  - attempting click action\n"
SLOW_CLICK = f"{CLICKING}    - click action done\n    - waiting for scheduled navigations to finish\n"
COVERED = f"{CLICKING}      - <div>overlay</div> intercepts pointer events\n    - retrying click action\n"
DISABLED = '\nCall log:\n    - fill("x")\n      - element is not enabled\n'

ERRORS = {
    "no session": (Call.OBSERVE, None, NO_SESSION, FailureKind.SESSION_LOST, ENVIRONMENT),
    "browser closed": (Call.OBSERVE, None, CLOSED, FailureKind.BROWSER_DIED, ENVIRONMENT),
    "browser closed on navigate": (
        Call.NAVIGATE,
        ELSEWHERE,
        "navigate failed: Page.goto: Target page, context or browser has been closed",
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "target crashed": (Call.OBSERVE, None, CRASHED, FailureKind.BROWSER_DIED, ENVIRONMENT),
    "page crashed": (
        Call.NAVIGATE,
        START,
        f"navigate failed: Page.goto: Page crashed{NAVIGATING}",
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "driver gone": (Call.OBSERVE, None, DRIVER, FailureKind.BROWSER_DIED, ENVIRONMENT),
    "crashed from chrome://": (
        Call.OBSERVE,
        "chrome://crash",
        CRASHED,
        FailureKind.BROWSER_CRASHED_BY_POLICY,
        POLICY_WRECK,
    ),
    "crashed after about:blank": (Call.OBSERVE, "about:blank", CRASHED, FailureKind.BROWSER_DIED, ENVIRONMENT),
    "element not on the page": (
        Call.CLICK,
        None,
        "click failed: 'element_id 99 not in last observation; call browser_observe first'",
        FailureKind.BAD_ELEMENT,
        POLICY,
    ),
    "negative element": (
        Call.TYPE,
        None,
        "type failed: 'element_id -1 not in last observation; call browser_observe first'",
        FailureKind.BAD_ELEMENT,
        POLICY,
    ),
    "element gone from the page": (
        Call.CLICK,
        None,
        f"click failed: ElementHandle.click: Element is not attached to the DOM{CLICKING}",
        FailureKind.BAD_ELEMENT,
        POLICY,
    ),
    "typing into a link": (
        Call.TYPE,
        None,
        f"type failed: ElementHandle.fill: Error: Element is not an <input>, <textarea> element{DISABLED}",
        FailureKind.ELEMENT_NOT_USABLE,
        POLICY,
    ),
    "typing into a checkbox": (
        Call.TYPE,
        None,
        f'type failed: ElementHandle.fill: Error: Input of type "checkbox" cannot be filled{DISABLED}',
        FailureKind.ELEMENT_NOT_USABLE,
        POLICY,
    ),
    "covered element": (
        Call.CLICK,
        None,
        f"click failed: ElementHandle.click: Timeout 5000ms exceeded.{COVERED}",
        FailureKind.ELEMENT_NOT_USABLE,
        POLICY,
    ),
    "disabled element": (
        Call.TYPE,
        None,
        f"type failed: ElementHandle.fill: Timeout 5000ms exceeded.{DISABLED}",
        FailureKind.ELEMENT_NOT_USABLE,
        POLICY,
    ),
    "click that happened, page still loading": (
        Call.CLICK,
        None,
        f"click failed: ElementHandle.click: Timeout 5000ms exceeded.{SLOW_CLICK}",
        FailureKind.CLICK_STILL_LOADING,
        PASSING,
    ),
    "page replaced while it was read": (
        Call.CLICK,
        None,
        "click failed: Page.title: Execution context was destroyed, most likely because of a navigation",
        FailureKind.PAGE_CHANGED,
        PASSING,
    ),
    "not a URL": (
        Call.NAVIGATE,
        "not a url",
        f"navigate failed: Page.goto: Protocol error (Page.navigate): Cannot navigate to invalid URL{NAVIGATING}",
        FailureKind.BAD_URL,
        POLICY,
    ),
    "javascript:": (
        Call.NAVIGATE,
        "javascript:alert(1)",
        f"navigate failed: Page.goto: net::ERR_ABORTED at javascript:alert(1){NAVIGATING}",
        FailureKind.BAD_URL,
        POLICY,
    ),
    "forbidden port": (
        Call.NAVIGATE,
        "http://127.0.0.1:9/",
        f"navigate failed: Page.goto: net::ERR_UNSAFE_PORT at http://127.0.0.1:9/{NAVIGATING}",
        FailureKind.BAD_URL,
        POLICY,
    ),
    "download": (
        Call.NAVIGATE,
        f"{START}/dl",
        f"navigate failed: Page.goto: Download is starting{NAVIGATING}",
        FailureKind.BAD_URL,
        POLICY,
    ),
    "redirect loop": (
        Call.NAVIGATE,
        f"{START}/loop",
        f"navigate failed: Page.goto: net::ERR_TOO_MANY_REDIRECTS at {START}/loop{NAVIGATING}",
        FailureKind.NAVIGATION_FAILED,
        POLICY,
    ),
    "unknown error": (
        Call.OBSERVE,
        None,
        "observe failed: Locator.count: brand new",
        FailureKind.UNCLASSIFIED,
        MEASUREMENT,
    ),
    "unknown text": (Call.FINISH, None, "the flux capacitor is empty", FailureKind.UNCLASSIFIED, MEASUREMENT),
}

# Errors of the network: the same text is the environment's or the policy's by the address alone.
DOWN = ["net::ERR_CONNECTION_REFUSED", "net::ERR_NAME_NOT_RESOLVED", "net::ERR_CONNECTION_TIMED_OUT"]
PAGE_DOWN = ["net::ERR_EMPTY_RESPONSE", "net::ERR_HTTP_RESPONSE_CODE_FAILURE", "Timeout 30000ms exceeded."]
ADDRESSES = {
    "start page, host down": (START, DOWN, FailureKind.SITE_DOWN, ENVIRONMENT),
    "own site, host down": ("http://shop.test/other", DOWN, FailureKind.SITE_DOWN, ENVIRONMENT),
    "own host, other port": ("http://shop.test:81/start", DOWN, FailureKind.NAVIGATION_FAILED, POLICY),
    "own host, https": ("https://shop.test/start", DOWN, FailureKind.NAVIGATION_FAILED, POLICY),
    "invented host": (ELSEWHERE, DOWN, FailureKind.NAVIGATION_FAILED, POLICY),
    "start page, page down": (f"{START}/", PAGE_DOWN, FailureKind.SITE_DOWN, ENVIRONMENT),
    "own site, page down": ("http://shop.test/other", PAGE_DOWN, FailureKind.NAVIGATION_FAILED, POLICY),
    "invented host, page down": (ELSEWHERE, PAGE_DOWN, FailureKind.NAVIGATION_FAILED, POLICY),
}

LAUNCH = "Error('BrowserType.launch: Executable doesn\\'t exist at /x')"
CDP = "Error('BrowserType.connect_over_cdp: connect ECONNREFUSED 127.0.0.1:18222')"
GOTO = "Error('Page.goto: net::ERR_CONNECTION_REFUSED at http://shop.test/start')"
SCORING_KEY = "ValueError(\"verifier_metadata has no supported scoring key (got ['urlcontains']; expected one of [])\")"
VALIDATION = "1 validation error for BrowserSeedSessionRequest\ninitial_url\n  Input should be a valid string"

STATUSES = {
    "start page refused": (Call.SEED, 500, GOTO, FailureKind.START_PAGE_FAILED, ENVIRONMENT),
    "start page hangs": (
        Call.SEED,
        500,
        "TimeoutError('Page.goto: Timeout 30000ms exceeded.')",
        FailureKind.START_PAGE_FAILED,
        ENVIRONMENT,
    ),
    "browser does not launch": (Call.SEED, 500, LAUNCH, FailureKind.BROWSER_LAUNCH_FAILED, ENVIRONMENT),
    "no browser is installed": (
        Call.SEED,
        500,
        'RuntimeError("Could not install Playwright Chromium, which the local browser backend needs.")',
        FailureKind.BROWSER_LAUNCH_FAILED,
        ENVIRONMENT,
    ),
    "browser endpoint refuses": (Call.SEED, 500, CDP, FailureKind.BROWSER_LAUNCH_FAILED, ENVIRONMENT),
    "browser dies while starting": (
        Call.SEED,
        500,
        "TargetClosedError('Target page, context or browser has been closed')",
        FailureKind.BROWSER_LAUNCH_FAILED,
        ENVIRONMENT,
    ),
    "provider out of sessions": (
        Call.SEED,
        500,
        "BrowserSessionError('Too many concurrent active sessions')",
        FailureKind.PROVIDER_FULL,
        ENVIRONMENT,
    ),
    "seed data does not validate": (Call.SEED, 500, VALIDATION, FailureKind.TASK_DATA_ERROR, MEASUREMENT),
    "seed refused": (Call.SEED, 422, '{"detail": []}', FailureKind.TASK_DATA_ERROR, MEASUREMENT),
    "start page is no URL": (
        Call.SEED,
        500,
        "Error('Page.goto: Protocol error (Page.navigate): Cannot navigate to invalid URL')",
        FailureKind.TASK_DATA_ERROR,
        MEASUREMENT,
    ),
    "misspelled scoring key": (Call.VERIFY, 500, SCORING_KEY, FailureKind.TASK_DATA_ERROR, MEASUREMENT),
    "verify refused": (Call.VERIFY, 422, '{"detail": []}', FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "server shuts down": (Call.NAVIGATE, 500, '"Request was cancelled"', FailureKind.ENVIRONMENT_SHUTDOWN, ENVIRONMENT),
    "server shuts down in a seed": (
        Call.SEED,
        500,
        '"Request was cancelled"',
        FailureKind.ENVIRONMENT_SHUTDOWN,
        ENVIRONMENT,
    ),
    "server breaks": (Call.OBSERVE, 500, "Already borrowed", FailureKind.SERVER_ERROR, ENVIRONMENT),
    "proxy in front": (Call.CLICK, 502, "<html>Bad Gateway</html>", FailureKind.SERVER_ERROR, ENVIRONMENT),
    "rate limited": (Call.SEED, 429, "Too many concurrent active sessions", FailureKind.PROVIDER_FULL, ENVIRONMENT),
    "overloaded": (Call.OBSERVE, 503, "", FailureKind.PROVIDER_FULL, ENVIRONMENT),
    "action refused": (Call.CLICK, 422, '{"detail": []}', FailureKind.ACTION_REJECTED, POLICY),
    "unknown tool": (Call.CLICK, 404, '{"detail": "Not Found"}', FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "not our server": (Call.SEED, 405, "Method Not Allowed", FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "redirected": (Call.SEED, 302, "", FailureKind.REQUEST_REJECTED, MEASUREMENT),
}

UNREACHABLE = "browser unreachable while scoring: "
VERDICTS = {
    "session lost": ({"failure_reason": "browser session not found at verify"}, FailureKind.SESSION_LOST, ENVIRONMENT),
    "browser closed": (
        {"failure_reason": f"{UNREACHABLE}TargetClosedError: {CLOSED.removeprefix('observe failed: ')}"},
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "target crashed": (
        {"failure_reason": f"{UNREACHABLE}Error: Locator.count: Target crashed "},
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "driver gone": (
        {"failure_reason": f"{UNREACHABLE}RuntimeError: {DRIVER.removeprefix('observe failed: ')}"},
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "bad scoring value": (
        {"failure_reason": f"{UNREACHABLE}TypeError: 'in <string>' requires string as left operand, not int"},
        FailureKind.TASK_DATA_ERROR,
        MEASUREMENT,
    ),
    "scoring broke": (
        {"failure_reason": f"{UNREACHABLE}Error: something new"},
        FailureKind.SCORING_FAILED,
        MEASUREMENT_AGAIN,
    ),
    "unknown reason": ({"failure_reason": "brand new"}, FailureKind.UNCLASSIFIED, MEASUREMENT),
    "masked": ({"reward": 1.0, "mask_sample": True}, FailureKind.REWARD_MASKED, MEASUREMENT_AGAIN),
    "masked, new kind": (
        {"reward": 1.0, "mask_sample": True, "failure_kind": "new:x"},
        FailureKind.REWARD_MASKED,
        MEASUREMENT_AGAIN,
    ),
    "masked in the older place": (
        {"mask_sample": False, "instance_config": {"mask_sample": True}},
        FailureKind.REWARD_MASKED,
        MEASUREMENT_AGAIN,
    ),
    "judge failed": (
        {"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "429"},
        FailureKind.SCORING_FAILED,
        MEASUREMENT_AGAIN,
    ),
    "gym says session lost": ({"failure_kind": "session_lost"}, FailureKind.SESSION_LOST, ENVIRONMENT),
    "gym says quota": ({"failure_kind": "provider_quota_exhausted"}, FailureKind.PROVIDER_FULL, ENVIRONMENT),
    "gym says transport": ({"failure_kind": "transport_timeout"}, FailureKind.ENVIRONMENT_DISCONNECTED, ENVIRONMENT),
    "gym says killed": ({"failure_kind": "kill_shaped"}, FailureKind.ENVIRONMENT_SHUTDOWN, ENVIRONMENT),
    "gym says out of memory": ({"failure_kind": "provider_oom_killed"}, FailureKind.BROWSER_DIED, ENVIRONMENT),
    "unknown kind": ({"failure_kind": "new:x"}, FailureKind.UNCLASSIFIED, MEASUREMENT),
    "reward null": ({"reward": None}, FailureKind.MALFORMED_ANSWER, ENVIRONMENT),
    "reward nan": ({"reward": float("nan")}, FailureKind.MALFORMED_ANSWER, ENVIRONMENT),
    "reward true": ({"reward": True}, FailureKind.MALFORMED_ANSWER, ENVIRONMENT),
    "reward as text": ({"reward": "1.0"}, FailureKind.MALFORMED_ANSWER, ENVIRONMENT),
}

SERVER = SimpleNamespace(host="127.0.0.1", port=1, ssl=True)
REFUSED = aiohttp.ClientConnectorError(SERVER, ConnectionRefusedError(111, "Connect call failed"))
EXCEPTIONS = {
    "refused": (Call.SEED, None, REFUSED, FailureKind.ENVIRONMENT_UNREACHABLE, ENVIRONMENT),
    "no answer to the connect": (
        Call.SEED,
        None,
        aiohttp.ConnectionTimeoutError(),
        FailureKind.ENVIRONMENT_UNREACHABLE,
        ENVIRONMENT,
    ),
    "seed never answers": (Call.SEED, None, TimeoutError(), FailureKind.SEED_TIMEOUT, ENVIRONMENT),
    "observe never answers": (Call.OBSERVE, None, TimeoutError(), FailureKind.ACT_TIMEOUT, ENVIRONMENT),
    "finish never answers": (Call.FINISH, None, TimeoutError(), FailureKind.ACT_TIMEOUT, ENVIRONMENT),
    "verify never answers": (Call.VERIFY, None, TimeoutError(), FailureKind.VERIFY_TIMEOUT, ENVIRONMENT),
    "own page never answers": (Call.OBSERVE, START, TimeoutError(), FailureKind.ACT_TIMEOUT, ENVIRONMENT),
    "refused address, then silence": (Call.OBSERVE, "not a url", TimeoutError(), FailureKind.ACT_TIMEOUT, ENVIRONMENT),
    "policy's page never answers": (Call.OBSERVE, ELSEWHERE, TimeoutError(), FailureKind.HUNG_BY_POLICY, POLICY_WRECK),
    "policy's page hangs verify": (Call.VERIFY, ELSEWHERE, TimeoutError(), FailureKind.HUNG_BY_POLICY, POLICY_WRECK),
    "server killed": (
        Call.NAVIGATE,
        None,
        aiohttp.ServerDisconnectedError(),
        FailureKind.ENVIRONMENT_DISCONNECTED,
        ENVIRONMENT,
    ),
    "connection reset": (
        Call.CLICK,
        None,
        aiohttp.ClientOSError(104, "Connection reset by peer"),
        FailureKind.ENVIRONMENT_DISCONNECTED,
        ENVIRONMENT,
    ),
    "answer cut short": (
        Call.CLICK,
        None,
        aiohttp.ClientPayloadError("not completed"),
        FailureKind.ENVIRONMENT_DISCONNECTED,
        ENVIRONMENT,
    ),
    "cancelled is no timeout": (
        Call.CLICK,
        None,
        asyncio.CancelledError("TimeoutError"),
        FailureKind.UNCLASSIFIED,
        MEASUREMENT,
    ),
    "unknown exception": (Call.CLICK, None, RuntimeError("TimeoutError"), FailureKind.UNCLASSIFIED, MEASUREMENT),
}


@pytest.mark.parametrize(("call", "policy_url", "error", "kind", "want"), ERRORS.values(), ids=ERRORS)
def test_error_of_an_action(call, policy_url, error, kind, want):
    failure = classify_error(error, context(call, policy_url))
    assert (failure.kind, columns(failure)) == (kind, want)


@pytest.mark.parametrize(("url", "errors", "kind", "want"), ADDRESSES.values(), ids=ADDRESSES)
def test_page_that_does_not_load_is_blamed_by_its_address(url, errors, kind, want):
    for error in errors:
        failure = classify_error(
            f"navigate failed: Page.goto: {error} at {url}{NAVIGATING}", context(Call.NAVIGATE, url)
        )
        assert (failure.kind, columns(failure)) == (kind, want), error


@pytest.mark.parametrize(("call", "status", "body", "kind", "want"), STATUSES.values(), ids=STATUSES)
def test_http_status(call, status, body, kind, want):
    failure = classify_status(status, body, context(call))
    assert (failure.kind, columns(failure)) == (kind, want)


@pytest.mark.parametrize(("answer", "kind", "want"), VERDICTS.values(), ids=VERDICTS)
def test_verdict_that_measures_nothing(answer, kind, want):
    failure = classify_verdict({"reward": 0.0, **answer}, context(Call.VERIFY))
    assert (failure.kind, columns(failure)) == (kind, want)


@pytest.mark.parametrize("reward", [0.0, 1.0, 1, 0.5, -1.0])
def test_verdict_that_measures(reward):
    answer = {"reward": reward, "mask_sample": False, "failure_kind": None, "failure_reason": None}
    assert classify_verdict(answer, context(Call.VERIFY)) is None


def test_crash_found_at_verify_is_the_policys_if_it_went_to_a_browser_page():
    answer = {"reward": 0.0, "failure_reason": f"{UNREACHABLE}Error: Locator.count: Target crashed "}
    failure = classify_verdict(answer, context(Call.VERIFY, "chrome://crash"))
    assert (failure.kind, columns(failure)) == (FailureKind.BROWSER_CRASHED_BY_POLICY, POLICY_WRECK)


@pytest.mark.parametrize(("call", "policy_url", "error", "kind", "want"), EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_exception_of_the_client(call, policy_url, error, kind, want):
    failure = classify_exception(error, context(call, policy_url))
    assert (failure.kind, columns(failure)) == (kind, want)


ERROR_PAGE = "URL: chrome-error://chromewebdata/\nTITLE: shop.test\nELEMENTS:"


@pytest.mark.parametrize(
    ("acted", "policy_url", "kind", "want"),
    [
        (False, None, FailureKind.START_PAGE_FAILED, ENVIRONMENT),
        (True, None, FailureKind.DEAD_LINK, PASSING),
        (True, ELSEWHERE, FailureKind.NAVIGATION_FAILED, POLICY),
    ],
    ids=["before any action", "after a click", "after navigating there"],
)
def test_error_page_of_the_browser(acted, policy_url, kind, want):
    failure = classify_observation(ERROR_PAGE, context(Call.OBSERVE, policy_url, acted))
    assert (failure.kind, columns(failure)) == (kind, want)


@pytest.mark.parametrize(
    "observation",
    [
        "",
        "URL: http://shop.test/\nTITLE: 500\nELEMENTS:",
        "URL: http://a/\nTITLE: x\nTEXT:\n  chrome-error://chromewebdata/",
    ],
    ids=["finish", "a site's own error page", "page that quotes the address"],
)
def test_ordinary_observation_is_no_failure(observation):
    assert classify_observation(observation, context(Call.OBSERVE)) is None


LOOKALIKES = [
    f'type failed: ElementHandle.fill: Timeout 5000ms exceeded.\nCall log:\n    - fill("{NO_SESSION}")\n',
    f'type failed: ElementHandle.fill: Timeout 5000ms exceeded.\nCall log:\n    - fill("\n{CLOSED}\n")\n',
    "click failed: ElementHandle.click: Timeout 5000ms exceeded.\nCall log:\n - <b>Target crashed</b> intercepts\n",
    "navigate failed: Page.goto: net::ERR_NAME_NOT_RESOLVED at http://x.test/Target crashed",
    "navigate failed: Page.goto: net::ERR_NAME_NOT_RESOLVED at http://x.test/no active session; seed_session must be",
    "navigate failed: Page.goto: net::ERR_ABORTED at data:net::ERR_CONNECTION_REFUSED",
]


@pytest.mark.parametrize("error", LOOKALIKES)
def test_policy_cannot_fake_an_environment_failure_with_its_own_text(error):
    failure = classify_error(error, context(Call.NAVIGATE, ELSEWHERE))
    assert columns(failure) == POLICY


@pytest.mark.parametrize("url", ["http://[", "http://shop.test:port/", "", "   ", "http://", "HTTP://SHOP.TEST/x"])
def test_no_address_breaks_the_classification(url):
    error = f"navigate failed: Page.goto: net::ERR_NAME_NOT_RESOLVED at {url}{NAVIGATING}"
    assert classify_error(error, context(Call.NAVIGATE, url)).kind in (
        FailureKind.NAVIGATION_FAILED,
        FailureKind.SITE_DOWN,
    )


def test_every_kind_has_its_traits():
    assert set(TRAITS) == set(FailureKind)
    for kind, traits in TRAITS.items():
        assert not (traits.retryable and traits.fault is Fault.POLICY), f"{kind}: a policy's failure is never retried"
        assert traits.fatal or not traits.retryable, f"{kind}: an attempt that goes on needs no retry"


def test_evidence_is_a_short_line():
    evidence = failure_of(FailureKind.SERVER_ERROR, "a\n b " + "x" * 1000).evidence
    assert len(evidence) == EVIDENCE_CHARS
    assert evidence.startswith("a b x")
    assert evidence.endswith("...")


def test_evidence_says_which_call_failed():
    assert classify_status(500, "boom", context(Call.CLICK)).evidence == "click: HTTP 500 boom"
    assert "observe" in classify_exception(TimeoutError(), context(Call.OBSERVE)).evidence
