"""Each symptom that an action shows, with its kind, whose fault it is, and what may be done about it."""

import pytest

from rollout_failures import (
    EVIDENCE_CHARS,
    TRAITS,
    Call,
    FailureKind,
    Fault,
    classify_error,
    classify_exception,
    classify_observation,
    classify_status,
    failure_of,
)
from tests.failure_columns import (
    ELSEWHERE,
    ENVIRONMENT,
    MEASUREMENT,
    PASSING,
    POLICY,
    POLICY_WRECK,
    START,
    columns,
    context,
)

NAVIGATING = '\nCall log:\n  - navigating to "x", waiting until "domcontentloaded"\n'

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


@pytest.mark.parametrize(
    "url", ["chrome://crash", " CHROME://kill", "view-source:chrome://crash", "about:crash", "devtools://x"]
)
def test_crash_is_the_policys_until_a_page_is_observed_after_its_walk_to_a_browser_page(url):
    known = context(Call.NAVIGATE).after_action(url=url)
    error = f"navigate failed: Page.goto: Page crashed{NAVIGATING}"
    for after in (known, known.after_action(url=START), known.after_action(url=START).after_action(text="x")):
        failure = classify_error(error, after)
        assert (failure.kind, columns(failure)) == (FailureKind.BROWSER_CRASHED_BY_POLICY, POLICY_WRECK)
    failure = classify_error(error, known.after_page().after_action(url=START))
    assert (failure.kind, columns(failure)) == (FailureKind.BROWSER_DIED, ENVIRONMENT)


def test_context_remembers_what_the_policy_said_and_where_it_went():
    known = context(Call.SEED, acted=False).after_action(text="Tea BAGS").after_action(url="http://Shop.test/A")
    assert known.said.split("\n") == ["", "tea bags", "http://shop.test/a"]
    assert (known.acted, known.policy_url, known.earlier_urls) == (True, "http://Shop.test/A", ())
    onward = known.after_action(url=START).for_call(Call.VERIFY)
    assert (onward.call, onward.policy_url, onward.earlier_urls) == (Call.VERIFY, START, ("http://Shop.test/A",))
    shown = onward.after_page()
    assert (shown.policy_url, shown.earlier_urls, shown.said) == (None, (), onward.said)
    assert shown.after_action().acted


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
