"""The real server, driven into each failure: its kind, whose fault it is, and whether a fresh attempt may help."""

import asyncio
import json

import aiohttp
import pytest

from cpu.processes import kill_all
from environment_session import ActionName, BrowserAction, BrowserSession, EnvironmentGate
from rollout_failures import DEFAULT_BLOCKED_PATTERNS, Call, FailureKind, Fault, classify_status, classify_verdict
from tests.contract.episodes import OBSERVE, VERIFY_BODY, element, exchange, settings_for
from tests.failure_columns import ENVIRONMENT, MEASUREMENT, PASSING, POLICY, POLICY_WRECK, columns, context

pytestmark = pytest.mark.timeout(120)

CRASH = BrowserAction(ActionName.NAVIGATE, url="chrome://crash")


def navigate(url: str) -> BrowserAction:
    return BrowserAction(ActionName.NAVIGATE, url=url)


# The environment breaks


async def test_a_killed_browser_is_latched_for_the_rest_of_the_episode(session, server, site, browsers_gone):
    assert await session.seed(f"{site}/", {"answer_equals": "x"}) is None
    await session.act(OBSERVE)
    kill_all(server.browser_pids())
    await browsers_gone()
    failure = (await session.act(OBSERVE)).failure
    assert (failure.kind, columns(failure)) == (FailureKind.BROWSER_DIED, ENVIRONMENT)
    # From here on the server itself would answer as if nothing had happened.
    later = await session.act(BrowserAction(ActionName.FINISH, answer="x"))
    assert (later.failure, later.done) == (failure, False)
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (None, failure)


async def test_a_browser_killed_before_scoring_is_no_reward(session, server, site, browsers_gone):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    kill_all(server.browser_pids())
    await browsers_gone()
    verdict = await session.verify()
    assert verdict.reward is None
    assert (verdict.failure.kind, columns(verdict.failure)) == (FailureKind.BROWSER_DIED, ENVIRONMENT)


async def test_a_killed_server_is_the_environments_fault(session, server, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await asyncio.to_thread(server.kill)
    try:
        failure = (await session.act(OBSERVE)).failure
        assert failure.kind in (FailureKind.ENVIRONMENT_DISCONNECTED, FailureKind.ENVIRONMENT_UNREACHABLE)
        assert columns(failure) == ENVIRONMENT
        assert (await session.verify()).reward is None
    finally:
        await asyncio.to_thread(server.start)


async def test_a_restart_in_the_middle_of_an_episode_loses_its_session(session, server, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await session.act(OBSERVE)
    await asyncio.to_thread(server.restart)  # the loop must see the connection close meanwhile, as in a rollout
    failure = (await session.act(OBSERVE)).failure
    assert (failure.kind, columns(failure)) == (FailureKind.SESSION_LOST, ENVIRONMENT)
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (None, failure)


async def test_a_restart_before_scoring_loses_the_reward(session, server, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await asyncio.to_thread(server.restart)
    verdict = await session.verify()
    assert verdict.reward is None
    assert (verdict.failure.kind, columns(verdict.failure)) == (FailureKind.SESSION_LOST, ENVIRONMENT)


async def test_a_page_of_the_tasks_site_that_hangs_is_the_environments_fault(server, site, nothing_left):
    settings = settings_for(server, act_timeout_s=3.0)
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
        failure = (await session.act(navigate(f"{site}/never"))).failure
        assert (failure.kind, columns(failure)) == (FailureKind.ACT_TIMEOUT, ENVIRONMENT)
        assert (await session.verify()).reward is None
    await nothing_left()


async def test_a_session_whose_observe_never_answers_is_closed_and_freed(server, site, nothing_left):
    settings = settings_for(server, act_timeout_s=3.0)
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        assert await session.seed(f"{site}/stuck", {"dom_contains": "stuck"}) is None
        assert len(server.browser_pids()) == 1
        # The page needs a moment before it leaves for the address that hangs.
        while (failure := (await session.act(OBSERVE)).failure) is None:
            pass
        assert (failure.kind, columns(failure)) == (FailureKind.ACT_TIMEOUT, ENVIRONMENT)
        await nothing_left()  # at once, not only when the session ends
    assert (await session.verify()).reward is None


async def test_a_start_page_that_refuses_connections_is_not_the_policys_fault(session):
    failure = await session.seed("http://127.0.0.1:9/", {"dom_contains": "x"})
    assert (failure.kind, columns(failure)) == (FailureKind.START_PAGE_FAILED, ENVIRONMENT)


async def test_a_start_page_whose_host_does_not_resolve_is_not_the_policys_fault(session):
    failure = await session.seed("http://no-such-host.invalid/", {"dom_contains": "x"})
    assert (failure.kind, columns(failure)) == (FailureKind.START_PAGE_FAILED, ENVIRONMENT)


async def test_a_human_check_in_place_of_the_start_page_is_the_environments_fault(session, site):
    assert await session.seed(f"{site}/check", {"dom_contains": "plain"}) is None
    failure = (await session.act(OBSERVE)).failure
    assert (failure.kind, columns(failure)) == (FailureKind.PAGE_BLOCKED, ENVIRONMENT)
    assert (await session.verify()).reward is None


async def test_a_session_sees_nothing_of_the_one_before(server, site, nothing_left):
    settings = settings_for(server)
    for _ in range(2):
        async with BrowserSession(settings, EnvironmentGate(settings)) as session:
            assert await session.seed(f"{site}/marker", {"dom_contains": "kept"}) is None
            assert (await session.act(OBSERVE)).observation.rstrip().endswith("TEXT:\n  kept null")
            again = await session.act(navigate(f"{site}/marker"))
            assert again.observation.rstrip().endswith("TEXT:\n  kept yes c=yes")
    await nothing_left()


# The policy breaks something


MISTAKES = {
    "bad element": (BrowserAction(ActionName.CLICK, element_id=999), FailureKind.BAD_ELEMENT),
    "unresolvable host": (navigate("http://no-such-host.invalid/"), FailureKind.NAVIGATION_FAILED),
    "bad address": (navigate("not an address"), FailureKind.BAD_URL),
}


@pytest.mark.parametrize(("action", "kind"), MISTAKES.values(), ids=MISTAKES)
async def test_a_mistake_of_the_policy_does_not_end_the_episode(session, site, action, kind):
    assert await session.seed(f"{site}/", {"url_contains": "/next"}) is None
    await session.act(OBSERVE)
    result = await session.act(action)
    assert (result.failure.kind, columns(result.failure)) == (kind, POLICY)
    assert result.error and session.failure is None
    onward = await session.act(navigate(f"{site}/next"))
    # Asked at once, Chromium may still be on its way to the error page of the address that failed.
    while onward.failure is not None and onward.failure.kind is FailureKind.PAGE_CHANGED:
        onward = await session.act(navigate(f"{site}/next"))
    assert onward.failure is None
    assert (await session.verify()).reward == 1.0


async def test_typing_into_a_link_is_the_policys_mistake(session, site):
    assert await session.seed(f"{site}/", {"url_contains": "/next"}) is None
    shown = (await session.act(OBSERVE)).observation
    link = element(shown, "next page")
    failure = (await session.act(BrowserAction(ActionName.TYPE, element_id=link, text="x"))).failure
    assert (failure.kind, columns(failure)) == (FailureKind.ELEMENT_NOT_USABLE, POLICY)


async def test_a_dead_link_is_shown_and_ends_nothing(session, site):
    assert await session.seed(f"{site}/dead-link", {"url_contains": "/dead-link"}) is None
    shown = (await session.act(OBSERVE)).observation
    failure = (await session.act(BrowserAction(ActionName.CLICK, element_id=element(shown, "nowhere")))).failure
    assert (failure.kind, columns(failure), session.failure) == (FailureKind.DEAD_LINK, PASSING, None)


async def test_a_policy_that_crashes_its_browser_is_scored_zero(session, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await session.act(CRASH)
    failure = (await session.act(OBSERVE)).failure
    assert (failure.kind, columns(failure)) == (FailureKind.BROWSER_CRASHED_BY_POLICY, POLICY_WRECK)
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (0.0, None)


async def test_a_crash_that_the_policy_walks_away_from_is_the_policys_too(session, site):
    """Asked at once, Chromium crashes or turns the next address away first; neither is the environment's doing."""
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await session.act(CRASH)
    failure = (await session.act(navigate("http://127.0.0.1:9/"))).failure
    assert failure.fault is Fault.POLICY
    assert (await session.verify()).failure is None


async def test_a_crash_that_only_scoring_finds_is_the_policys_too(session, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await session.act(CRASH)
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert session.failure.kind is FailureKind.BROWSER_CRASHED_BY_POLICY


async def test_a_page_of_the_policys_own_choice_that_hangs_is_scored_zero(server, site, nothing_left):
    settings = settings_for(server, act_timeout_s=3.0)
    elsewhere = site.replace("127.0.0.1", "localhost")
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
        failure = (await session.act(navigate(f"{elsewhere}/never"))).failure
        assert (failure.kind, columns(failure)) == (FailureKind.HUNG_BY_POLICY, POLICY_WRECK)
        verdict = await session.verify()
        assert (verdict.reward, verdict.failure) == (0.0, None)
    await nothing_left()


async def test_a_human_check_that_the_policy_walks_to_elsewhere_is_an_ordinary_page(server, site, nothing_left):
    settings = settings_for(server)
    elsewhere = site.replace("127.0.0.1", "localhost")
    async with BrowserSession(settings, EnvironmentGate(settings), DEFAULT_BLOCKED_PATTERNS) as session:
        assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
        step = await session.act(navigate(f"{elsewhere}/check"))
        assert ("Verify you are human" in step.observation, step.failure) == (True, None)
        assert (await session.verify()).reward == 0.0
    await nothing_left()


# The reward is no measurement


async def test_a_misspelled_scoring_key_is_bad_task_data(session, site):
    assert await session.seed(f"{site}/", {"urlcontains": "/"}) is None
    verdict = await session.verify()
    assert verdict.reward is None
    assert (verdict.failure.kind, columns(verdict.failure)) == (FailureKind.TASK_DATA_ERROR, MEASUREMENT)
    assert "urlcontains" in verdict.failure.evidence


async def test_a_scoring_value_of_the_wrong_type_is_bad_task_data(session, site):
    assert await session.seed(f"{site}/", {"url_contains": 5}) is None
    verdict = await session.verify()
    assert verdict.reward is None
    assert (verdict.failure.kind, columns(verdict.failure)) == (FailureKind.TASK_DATA_ERROR, MEASUREMENT)


async def test_a_second_verify_finds_no_session_and_is_no_zero(server, site, nothing_left):
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        body = {"initial_url": f"{site}/", "verifier_metadata": {"dom_contains": "plain"}}
        assert (await exchange(http, f"{server.url}/seed_session", body))[0] == 200
        answers = [json.loads((await exchange(http, f"{server.url}/verify", VERIFY_BODY))[1]) for _ in range(2)]
    assert [answer["reward"] for answer in answers] == [1.0, 0.0]
    assert classify_verdict(answers[0], context(Call.VERIFY)) is None
    failure = classify_verdict(answers[1], context(Call.VERIFY))
    assert (failure.kind, columns(failure)) == (FailureKind.SESSION_LOST, ENVIRONMENT)
    await nothing_left()


REFUSED = {
    "action without its argument": ("/browser_click", {}, Call.CLICK, FailureKind.ACTION_REJECTED, POLICY),
    "unknown tool": ("/browser_scroll", {}, Call.CLICK, FailureKind.REQUEST_REJECTED, MEASUREMENT),
    "seed of another type": ("/seed_session", {"initial_url": 5}, Call.SEED, FailureKind.TASK_DATA_ERROR, MEASUREMENT),
}


@pytest.mark.parametrize(("path", "body", "call", "kind", "want"), REFUSED.values(), ids=REFUSED)
async def test_a_request_that_the_server_refuses(server, path, body, call, kind, want):
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        failure = classify_status(*await exchange(http, server.url + path, body), context(call))
    assert (failure.kind, columns(failure)) == (kind, want)
