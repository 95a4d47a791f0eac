"""A small site, actions on it, and sessions for the tests of the session and of the gate."""

from environment_gate import EnvironmentGate
from environment_session import ActionName, BrowserAction, BrowserSession
from recipe_settings import RecipeSettings
from tests.fake_site import Dead, Link, Page

START = "http://shop.test/"
SITE = {
    START: Page("Shop", "Welcome", (Link("Cart", "/cart"), Link("Dead", "http://gone.test/"))),
    "http://shop.test/cart": Page("Cart", "Empty"),
    "http://hang.test/": Dead("hang"),
}
SPEC = {"url_contains": "cart"}
OBSERVE = BrowserAction(ActionName.OBSERVE)
CLICK = BrowserAction(ActionName.CLICK, element_id=0)
FINISH = BrowserAction(ActionName.FINISH, answer="done")
OBSERVE_PATH, CLOSE_PATH, SEED_PATH, VERIFY_PATH = "/browser_observe", "/close_session", "/seed_session", "/verify"


def navigate(url):
    """Return the action that opens an address."""
    return BrowserAction(ActionName.NAVIGATE, url=url)


def type_text(element_id, text):
    """Return the action that types."""
    return BrowserAction(ActionName.TYPE, element_id=element_id, text=text)


ACTIONS = [OBSERVE, navigate(START), CLICK, type_text(0, "x"), FINISH]


def settings(environment, **changes):
    """Return settings with room for a slow machine; a test shortens the one deadline that it is about."""
    values = {name: 20.0 for name in ("seed_timeout_s", "act_timeout_s", "verify_timeout_s", "close_timeout_s")}
    return RecipeSettings(**{"environment_url": environment.url, **values, **changes})


def session_for(environment, **changes):
    """Return a session behind a gate of its own."""
    chosen = settings(environment, **changes)
    return BrowserSession(chosen, EnvironmentGate(chosen))
