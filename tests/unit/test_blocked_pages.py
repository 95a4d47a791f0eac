"""A human check in place of the task's page is the environment's failure, unless the policy brought it about."""

import re

import pytest

from rollout_failures import DEFAULT_BLOCKED_PATTERNS, Call, CallContext, FailureKind, classify_observation
from tests.failure_columns import ENVIRONMENT, columns

START = "http://shop.test/start"
PATTERNS = tuple(re.compile(pattern, re.IGNORECASE) for pattern in DEFAULT_BLOCKED_PATTERNS)
CHECK = "Verify you are human by completing the action below."


def context(acted=True, patterns=PATTERNS, start_url=START):
    return CallContext(Call.CLICK, start_url, acted=acted, blocked_patterns=patterns)


def page(text, url=START, title="Shop", elements=1):
    lines = [f"URL: {url}", f"TITLE: {title}", "ELEMENTS:", *(f"  [{i}] a: link {i}" for i in range(elements))]
    return "\n".join([*lines, "TEXT:", f"  {text}"])


def kind(observation, known):
    failure = classify_observation(observation, known)
    return failure and failure.kind


HUMAN_CHECKS = {
    "WebVoyager": page("Verify you are human"),
    "Cloudflare": page("shop.test Verifying you are human. This may take a few seconds.", title="Just a moment..."),
    "Cloudflare, title alone": page("shop.test", title="Just a moment..."),
    "Cloudflare, connection": page("shop.test needs to review the security of your connection before proceeding."),
    "Cloudflare, older": page("Checking your browser before accessing shop.test. Please allow up to 5 seconds."),
    "hCaptcha": page("One more step Please complete the security check to access shop.test"),
    "Google": page(
        "Our systems have detected unusual traffic from your computer network. This page checks to see if..."
    ),
    "Google's address": page("About this page", url="http://shop.test/www.google.com/sorry/index?continue=x"),
    "reCAPTCHA": page("Please solve this reCAPTCHA to continue to the site"),
    "Amazon": page("Enter the characters you see below Sorry, we just need to make sure you're not a robot."),
    "AWS": page("Let's confirm you are human Complete the security check before continuing."),
    "PerimeterX": page("Press & Hold to confirm you are a human (and not a bot). Reference ID 1"),
    "PerimeterX, denied": page("Access to this page has been denied because we believe you are using automation tools"),
    "Walmart": page("Robot or human? Activate and hold the button to confirm that you’re human. Thank You!"),
    "DataDome": page("Please enable JS and disable any ad blocker"),
    "DataDome's address": page("", url="http://geo.captcha-delivery.com.shop.test/captcha-delivery.com/captcha/"),
    "Imperva": page("As you were browsing something about your browser...", title="Pardon Our Interruption"),
}


@pytest.mark.parametrize("acted", [False, True], ids=["start page", "later page"])
@pytest.mark.parametrize("observation", HUMAN_CHECKS.values(), ids=HUMAN_CHECKS)
def test_human_check_on_the_tasks_site_is_the_environments_failure(observation, acted):
    failure = classify_observation(observation, context(acted))
    assert (failure.kind, columns(failure)) == (FailureKind.PAGE_BLOCKED, ENVIRONMENT)


ORDINARY = {
    "a page": page("Welcome to the shop. 12 results for tea."),
    "an article about captchas": page("A CAPTCHA is a test to tell humans from robots. reCAPTCHA is Google's."),
    "a form with a captcha": page("Sign up Name Password I'm not a robot Privacy - Terms Send"),
    "a game": page("Press and hold the space bar to jump"),
    "traffic news": page("Unusual traffic on the A7 this morning"),
    "a firewall's page": page("Sorry, you have been blocked You are unable to access shop.test", title="Attention!"),
    "a forbidden page": page("You don't have permission to access /admin on this server."),
    "a title that waits": page("Loading", title="Just a moment... please"),
    "no text": page(""),
}


@pytest.mark.parametrize("acted", [False, True], ids=["start page", "later page"])
@pytest.mark.parametrize("observation", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_page_is_no_human_check(observation, acted):
    assert classify_observation(observation, context(acted)) is None


SITES = {
    "same host": ("http://shop.test/other", FailureKind.PAGE_BLOCKED),
    "same host over https": ("https://shop.test/other", FailureKind.PAGE_BLOCKED),
    "subdomain": ("http://check.shop.test/", FailureKind.PAGE_BLOCKED),
    "parent": ("http://test/", FailureKind.PAGE_BLOCKED),
    "another site": ("http://made-up.test/", None),
    "a host that ends alike": ("http://my-shop.test/", None),
    "a file": ("file:///tmp/check.html", None),
    "a broken address": ("http://[", None),
}


@pytest.mark.parametrize(("url", "want"), SITES.values(), ids=SITES)
def test_human_check_that_the_policy_walked_into_elsewhere_is_an_ordinary_page(url, want):
    assert kind(page(CHECK, url=url), context(acted=True)) is want


@pytest.mark.parametrize("url", [url for url, _ in SITES.values()], ids=SITES)
def test_before_any_action_no_page_is_the_policys(url):
    assert kind(page(CHECK, url=url), context(acted=False)) is FailureKind.PAGE_BLOCKED


def test_without_a_host_of_its_own_a_task_has_no_site_to_be_blocked_on():
    known = context(acted=True, start_url="site/index.html")
    assert kind(page(CHECK, url="file:///GYM/site/index.html"), known) is None


SAID = {
    "typed": {"text": "verify you are human"},
    "typed in another case": {"text": "VERIFY You Are Human"},
    "typed with other blanks": {"text": "verify\u00a0you  are\thuman"},
    "typed in full-width letters": {"text": "ｖｅｒｉｆｙ you are human"},
    "typed as entities": {"text": "verify&#32;you&nbsp;are&#x20;hum&#97;n"},
    "in the address": {"url": f"{START}?q=verify you are human"},
    "in the address, encoded": {"url": f"{START}?q=verify+you%20are+hum%61n"},
    "in the address, encoded twice": {"url": f"{START}?q=verify%2520you%2520are%2520hum%2561n"},
    "in the fragment": {"url": f"{START}#verify-you-are-human"},
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_page_that_echoes_what_the_policy_said_is_no_way_out(said):
    known = context(acted=False).after_action(**said)
    assert kind(page("No results for Verify you are human"), known) is None


def test_words_that_the_policy_said_in_pieces_are_its_own_too():
    known = context(acted=False).after_action(text="are human").after_action(text="verify you")
    assert kind(page("Verify you are human"), known) is None


def test_what_the_policy_said_about_something_else_does_not_hide_a_human_check():
    known = context(acted=False).after_action(text="tea for a human").after_action(url="http://shop.test/you")
    assert kind(page(CHECK), known) is FailureKind.PAGE_BLOCKED


def test_another_phrase_of_the_same_page_still_tells_a_human_check():
    known = context(acted=False).after_action(text="verify you are human")
    shown = page("No results for Verify you are human", title="Just a moment...")
    assert kind(shown, known) is FailureKind.PAGE_BLOCKED
    shown = page("Verify you are human. Confirm you are human.")
    assert kind(shown, known) is FailureKind.PAGE_BLOCKED


@pytest.mark.parametrize(
    "observation", [page(f"{CHECK} " + "x " * 1000), page(CHECK, elements=30)], ids=["long text", "many links"]
)
def test_full_page_that_holds_such_words_is_found_by_walking_there(observation):
    assert kind(observation, context(acted=True)) is None
    assert kind(observation, context(acted=False)) is FailureKind.PAGE_BLOCKED


def test_evidence_names_what_was_read_where_and_the_pattern():
    pattern = re.compile("bot wall", re.IGNORECASE)
    failure = classify_observation(page("This is a Bot Wall."), context(patterns=(pattern,)))
    assert failure.evidence == f"'Bot Wall' at {START} (pattern 'bot wall')"


def test_without_patterns_no_page_is_taken_for_a_human_check():
    assert classify_observation(page(CHECK), context(acted=False, patterns=())) is None


def test_error_page_of_the_browser_comes_before_any_pattern():
    shown = page(CHECK, url="chrome-error://chromewebdata/")
    assert kind(shown, context(acted=False)) is FailureKind.START_PAGE_FAILED


@pytest.mark.parametrize("pattern", DEFAULT_BLOCKED_PATTERNS)
def test_default_pattern_is_a_phrase_and_not_a_word(pattern):
    compiled = re.compile(pattern, re.IGNORECASE)
    for harmless in ("", "captcha", "reCAPTCHA", "robot", "human", "blocked", "security check", "access denied"):
        assert not compiled.search(harmless)
