"""Each symptom of the HTTP exchange itself (status, exception, verdict), with its kind, blame and what may be done."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import aiohttp
import pytest

from rollout_failures import Call, FailureKind, Fault, classify_exception, classify_status, classify_verdict
from tests.failure_columns import (
    ELSEWHERE,
    ENVIRONMENT,
    MEASUREMENT,
    MEASUREMENT_AGAIN,
    POLICY,
    POLICY_WRECK,
    START,
    columns,
    context,
)

CLOSED = "Locator.count: Target page, context or browser has been closed"
DRIVER = "Locator.count: unable to perform operation on <WriteUnixTransport closed=True 0x7f99>; the handler is closed"

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
    "start page crashes the browser": (
        Call.SEED,
        500,
        f"Error('{CLOSED.replace('Locator.count', 'Page.goto')}')",
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "browser takes too long to launch": (
        Call.SEED,
        500,
        "TimeoutError('BrowserType.launch: Timeout 180000ms exceeded.')",
        FailureKind.BROWSER_LAUNCH_FAILED,
        ENVIRONMENT,
    ),
    "start page whose address speaks of a quota": (
        Call.SEED,
        500,
        "Error('Page.goto: net::ERR_CONNECTION_REFUSED at http://shop.test/too many sessions/quota/validation error')",
        FailureKind.START_PAGE_FAILED,
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
    "rate limited while scoring": (Call.VERIFY, 429, "", FailureKind.PROVIDER_FULL, ENVIRONMENT),
    "payment quota": (Call.SEED, 402, "Monthly browser quota exceeded", FailureKind.PROVIDER_FULL, ENVIRONMENT),
    "forbidden by the session limit": (
        Call.SEED,
        403,
        "You have reached your session limit",
        FailureKind.PROVIDER_FULL,
        ENVIRONMENT,
    ),
    "forbidden for another reason": (Call.SEED, 403, "Forbidden", FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "overloaded": (Call.OBSERVE, 503, "", FailureKind.PROVIDER_FULL, ENVIRONMENT),
    "action refused": (Call.CLICK, 422, '{"detail": []}', FailureKind.ACTION_REJECTED, POLICY),
    "unknown tool": (Call.CLICK, 404, '{"detail": "Not Found"}', FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "not our server": (Call.SEED, 405, "Method Not Allowed", FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "redirected": (Call.SEED, 302, "", FailureKind.REQUEST_REJECTED, MEASUREMENT),
}

PROVIDER_TEXTS = [
    "Too many concurrent active sessions",
    "HTTP 429",
    "too many requests",
    "Too Many Browsers",
    "rate-limited, try again",
    "Quota exceeded for project",
    "Maximum number of concurrent sessions reached",
    "max sessions reached",
    "concurrency limit exceeded",
    "limit of 5 concurrent sessions",
    "no available slots",
    "service is at capacity",
]

UNREACHABLE = "browser unreachable while scoring: "
VERDICTS = {
    "session lost": ({"failure_reason": "browser session not found at verify"}, FailureKind.SESSION_LOST, ENVIRONMENT),
    "browser closed": (
        {"failure_reason": f"{UNREACHABLE}TargetClosedError: {CLOSED}"},
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "target crashed": (
        {"failure_reason": f"{UNREACHABLE}Error: Locator.count: Target crashed "},
        FailureKind.BROWSER_DIED,
        ENVIRONMENT,
    ),
    "driver gone": (
        {"failure_reason": f"{UNREACHABLE}RuntimeError: {DRIVER}"},
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
    "kind in the older place": (
        {"instance_config": {"mask_sample": True, "failure_kind": "session_lost"}},
        FailureKind.SESSION_LOST,
        ENVIRONMENT,
    ),
    "kind in the older place, not masked": (
        {"instance_config": {"failure_kind": "new:x"}},
        FailureKind.UNCLASSIFIED,
        MEASUREMENT,
    ),
    "the older place is no object": (
        {"mask_sample": True, "instance_config": "x"},
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


@pytest.mark.parametrize(("call", "status", "body", "kind", "want"), STATUSES.values(), ids=STATUSES)
def test_http_status(call, status, body, kind, want):
    failure = classify_status(status, body, context(call))
    assert (failure.kind, columns(failure)) == (kind, want)


@pytest.mark.parametrize("text", PROVIDER_TEXTS)
def test_provider_that_is_full_is_known_by_its_words(text):
    failure = classify_status(500, f"BrowserSessionError('{text}')", context(Call.SEED))
    assert (failure.kind, columns(failure)) == (FailureKind.PROVIDER_FULL, ENVIRONMENT)


@pytest.mark.parametrize("call", [call for call in Call if call is not Call.SEED])
def test_words_of_a_provider_count_only_in_a_seed(call):
    assert classify_status(500, "Too many concurrent active sessions", context(call)).kind is FailureKind.SERVER_ERROR


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120.0), ("0", 0.0), ("1.5", 1.5), (" 7 ", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
    ids=["seconds", "at once", "fraction", "spaces", "date in the past"],
)
def test_retry_after_of_an_overloaded_server_is_kept(header, seconds):
    assert classify_status(503, "", context(Call.SEED), retry_after=header).retry_after_s == seconds


@pytest.mark.parametrize("zone", ["GMT", "-0000", "+0000"])
def test_retry_after_may_be_a_date(zone):
    then = datetime.now(UTC) + timedelta(seconds=40)
    header = f"{format_datetime(then).rpartition(' ')[0]} {zone}"
    assert 30 < classify_status(429, "", context(Call.SEED), retry_after=header).retry_after_s <= 40


@pytest.mark.parametrize(
    "header",
    [None, "", "soon", "-5", "1e9", "nan", "inf", "9" * 30, "Mon, 99 Foo 2026", f"Mon, 01 Jan {'9' * 30} 00:00:00 GMT"],
)
def test_retry_after_that_says_nothing_is_none(header):
    assert classify_status(429, "", context(Call.SEED), retry_after=header).retry_after_s is None


def test_retry_after_of_a_failure_that_is_not_retried_is_dropped():
    assert classify_status(422, "", context(Call.SEED), retry_after="5").retry_after_s is None


@pytest.mark.parametrize(("answer", "kind", "want"), VERDICTS.values(), ids=VERDICTS)
def test_verdict_that_measures_nothing(answer, kind, want):
    failure = classify_verdict({"reward": 0.0, **answer}, context(Call.VERIFY))
    assert (failure.kind, columns(failure)) == (kind, want)


@pytest.mark.parametrize("reason", [None, "it is said to be lost"])
def test_verdict_of_a_masked_sample_is_never_a_reward_whatever_else_it_says(reason):
    for kind in (None, "session_lost", "new:x", "agent_timeout"):
        answer = {"reward": 1.0, "mask_sample": True, "failure_kind": kind, "failure_reason": reason}
        assert classify_verdict(answer, context(Call.VERIFY)).fault is not Fault.POLICY


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
