"""A browser session keeps its promises whatever the environment does; against the fake environment, over real HTTP."""

import pytest

import rollout_failures
from environment_gate import EnvironmentGate
from environment_session import ActionName, BrowserAction, BrowserSession
from recipe_settings import RecipeSettings, SettingsError
from rollout_failures import DEFAULT_BLOCKED_PATTERNS, FailureKind
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import Dead, Field, Page
from tests.sessions import (
    ACTIONS,
    CLICK,
    CLOSE_PATH,
    FINISH,
    OBSERVE,
    OBSERVE_PATH,
    SEED_PATH,
    SITE,
    SPEC,
    START,
    VERIFY_PATH,
    navigate,
    session_for,
    settings,
    type_text,
)


@pytest.fixture
async def environment():
    async with FakeEnvironment(SITE) as fake:
        yield fake


# One episode


async def test_episode_is_seeded_played_scored_and_closed(environment):
    async with session_for(environment) as session:
        assert await session.seed(START, SPEC) is None
        first = await session.act(OBSERVE)
        assert first.observation.startswith(f"URL: {START}\nTITLE: Shop\nELEMENTS:\n  [0] a: Cart")
        assert (first.done, first.error, first.failure) == (False, None, None)
        assert "TITLE: Cart" in (await session.act(CLICK)).observation
        assert (await session.act(FINISH)).done
        verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (1.0, None)
    paths = [SEED_PATH, OBSERVE_PATH, "/browser_click", "/browser_finish", VERIFY_PATH, CLOSE_PATH]
    assert environment.seen.paths(1) == paths
    assert environment.seen.calls[0].body == {"initial_url": START, "verifier_metadata": SPEC}
    assert session.environment_s > 0
    assert session.failure is None


async def test_each_session_keeps_its_own_cookie_though_the_host_is_an_ip_address(environment):
    async with session_for(environment) as one, session_for(environment) as two:
        await one.seed(START, SPEC)
        await two.seed("http://shop.test/cart", SPEC)
        assert "TITLE: Shop" in (await one.act(OBSERVE)).observation
        assert "TITLE: Cart" in (await two.act(OBSERVE)).observation
    assert environment.seen.released == {1, 2}


async def test_second_verify_gives_the_same_verdict_and_asks_once(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        assert await session.verify() == await session.verify()
    assert environment.seen.paths().count(VERIFY_PATH) == 1


async def test_half_a_surrogate_pair_reaches_the_server_as_text(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        await session.act(BrowserAction(ActionName.FINISH, answer="\ud83d!"))
    assert environment.seen.calls[-2].body == {"answer": "?!"}


async def test_session_without_an_address_is_refused_and_takes_no_slot():
    gate = EnvironmentGate(RecipeSettings(max_open_sessions=1))
    for _ in range(2):
        with pytest.raises(SettingsError, match="NEMO_GYM_URL"):
            await BrowserSession(RecipeSettings(), gate).__aenter__()


# Failures


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
async def test_action_that_is_never_answered_meets_its_deadline(environment, action):
    environment.faults.append(Fault(Do.HANG, path=f"/browser_{action.name}"))
    async with session_for(environment, act_timeout_s=0.1) as session:
        await session.seed(START, SPEC)
        result = await session.act(action)
        assert result.failure.kind is FailureKind.ACT_TIMEOUT
        assert session.failure is result.failure


async def test_seed_that_is_never_answered_meets_its_deadline(environment):
    environment.faults.append(Fault(Do.HANG, path=SEED_PATH))
    async with session_for(environment, seed_timeout_s=0.1) as session:
        assert (await session.seed(START, SPEC)).kind is FailureKind.SEED_TIMEOUT
    assert environment.seen.paths() == [SEED_PATH, CLOSE_PATH]


async def test_verify_that_is_never_answered_meets_its_deadline(environment):
    environment.faults.append(Fault(Do.HANG, path=VERIFY_PATH))
    async with session_for(environment, verify_timeout_s=0.1) as session:
        await session.seed(START, SPEC)
        verdict = await session.verify()
    assert (verdict.reward, verdict.failure.kind) == (None, FailureKind.VERIFY_TIMEOUT)
    assert environment.seen.paths() == [SEED_PATH, VERIFY_PATH, CLOSE_PATH]


async def test_session_whose_observe_hangs_is_closed_at_once(environment):
    environment.faults.append(Fault(Do.HANG, path=OBSERVE_PATH))
    async with session_for(environment, act_timeout_s=0.1) as session:
        await session.seed(START, SPEC)
        await session.act(OBSERVE)
        await environment.until(lambda seen: CLOSE_PATH in seen.paths())
    assert environment.seen.paths().count(CLOSE_PATH) == 1


DEATHS = {
    "browser killed": (Do.KILL_BROWSER, FailureKind.BROWSER_DIED),
    "renderer killed": (Do.CRASH_PAGE, FailureKind.BROWSER_DIED),
    "driver killed": (Do.KILL_DRIVER, FailureKind.BROWSER_DIED),
    "session lost": (Do.LOSE_SESSION, FailureKind.SESSION_LOST),
    "connection dropped": (Do.DISCONNECT, FailureKind.ENVIRONMENT_DISCONNECTED),
    "server error": (Do.STATUS, FailureKind.SERVER_ERROR),
}


@pytest.mark.parametrize(("fault", "kind"), DEATHS.values(), ids=DEATHS)
async def test_first_fatal_failure_is_latched_and_the_server_is_not_asked_again(environment, fault, kind):
    # Under answer_equals the server itself would score the dead session 1.0 without a word.
    environment.faults.append(Fault(fault, path=OBSERVE_PATH, call=2))
    async with session_for(environment) as session:
        await session.seed(START, {"answer_equals": "done"})
        await session.act(OBSERVE)
        failure = (await session.act(OBSERVE)).failure
        calls = len(environment.seen.calls)
        for action in ACTIONS:
            result = await session.act(action)
            assert (result.failure, result.observation, result.done) == (failure, "", False)
        assert await session.seed(START, SPEC) is failure
        verdict = await session.verify()
        asked = [call.path for call in environment.seen.calls[calls:]]
    assert failure.kind is kind
    assert (verdict.reward, verdict.failure) == (None, failure)
    assert asked in ([], [CLOSE_PATH])
    assert session.failure is failure


async def test_mistake_of_the_policy_comes_back_as_text_and_the_episode_goes_on(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        result = await session.act(BrowserAction(ActionName.CLICK, element_id=99))
        assert result.error == "click failed: 'element_id 99 not in last observation; call browser_observe first'"
        assert (result.failure.kind, result.failure.fatal) == (FailureKind.BAD_ELEMENT, False)
        assert (await session.act(navigate("http://made-up.test/"))).failure.kind is FailureKind.NAVIGATION_FAILED
        assert session.failure is None
        assert (await session.act(navigate("http://shop.test/cart"))).failure is None
        assert (await session.verify()).reward == 1.0


async def test_own_site_going_down_ends_the_attempt(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        environment.site[START] = Dead("net::ERR_CONNECTION_REFUSED")
        assert (await session.act(navigate(START))).failure.kind is FailureKind.SITE_DOWN
        assert (await session.verify()).failure.kind is FailureKind.SITE_DOWN


async def test_link_to_a_dead_page_is_shown_and_noted(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        await session.act(OBSERVE)
        result = await session.act(BrowserAction(ActionName.CLICK, element_id=1))
        assert result.observation.startswith("URL: chrome-error:")
        assert (result.failure.kind, session.failure) == (FailureKind.DEAD_LINK, None)


async def test_breaking_the_browser_is_no_way_out_for_the_policy(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        await session.act(navigate("chrome://crash"))
        assert (await session.act(OBSERVE)).failure.kind is FailureKind.BROWSER_CRASHED_BY_POLICY
        verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (0.0, None)


async def test_hanging_on_a_page_of_its_own_choice_is_no_way_out_for_the_policy(environment):
    environment.faults.append(Fault(Do.HANG, path=OBSERVE_PATH))
    async with session_for(environment, act_timeout_s=0.5) as session:
        await session.seed(START, SPEC)
        assert not (await session.act(navigate("http://hang.test/"))).failure.fatal
        assert (await session.act(OBSERVE)).failure.kind is FailureKind.HUNG_BY_POLICY
        assert (await session.verify()).reward == 0.0


async def test_page_that_was_shown_clears_the_policy_of_a_later_hang(environment):
    environment.faults.append(Fault(Do.HANG, path=OBSERVE_PATH, call=2))
    environment.site["http://other.test/"] = Page("Other")
    async with session_for(environment, act_timeout_s=0.5) as session:
        await session.seed(START, SPEC)
        await session.act(navigate("http://other.test/"))
        await session.act(OBSERVE)
        assert (await session.act(OBSERVE)).failure.kind is FailureKind.ACT_TIMEOUT


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Do.GARBAGE, text="<html>"),
        Fault(Do.GARBAGE, text='{"observation": "cut'),
        Fault(Do.ANSWER, body=[1]),
        Fault(Do.ANSWER, body={}),
        Fault(Do.ANSWER, body={"observation": 5}),
        Fault(Do.ANSWER, body={"observation": "", "done": "yes", "error": None}),
        Fault(Do.ANSWER, body={"observation": "", "done": False, "error": {"code": 1}}),
    ],
    ids=lambda fault: fault.text if fault.do is Do.GARBAGE else str(fault.body),
)
async def test_answer_that_is_no_observation_is_the_environments_failure(environment, fault):
    environment.faults.append(Fault(fault.do, path=OBSERVE_PATH, text=fault.text, body=fault.body))
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        assert (await session.act(OBSERVE)).failure.kind is FailureKind.MALFORMED_ANSWER


VERDICTS = {
    "valid zero": ({"reward": 0.0, "mask_sample": False}, 0.0, None),
    "valid one": ({"reward": 1}, 1.0, None),
    "masked": ({"reward": 1.0, "mask_sample": True, "failure_kind": "new:x"}, None, FailureKind.REWARD_MASKED),
    "masked in the older place": (
        {"reward": 0.0, "mask_sample": False, "instance_config": {"mask_sample": True}},
        None,
        FailureKind.REWARD_MASKED,
    ),
    "reason": (
        {"reward": 0.0, "failure_reason": "browser session not found at verify"},
        None,
        FailureKind.SESSION_LOST,
    ),
    "kind": ({"reward": 0.0, "failure_kind": "session_expired"}, None, FailureKind.SESSION_LOST),
    "no reward": ({}, None, FailureKind.MALFORMED_ANSWER),
}


@pytest.mark.parametrize(("answer", "reward", "kind"), VERDICTS.values(), ids=VERDICTS)
async def test_verdict_is_a_reward_or_a_failure(environment, answer, reward, kind):
    environment.faults.append(Fault(Do.ANSWER, path=VERIFY_PATH, body=answer))
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        verdict = await session.verify()
    assert (verdict.reward, verdict.failure and verdict.failure.kind) == (reward, kind)


async def test_misspelled_scoring_key_is_bad_task_data(environment):
    async with session_for(environment) as session:
        await session.seed(START, {"urlcontains": "x"})
        assert (await session.verify()).failure.kind is FailureKind.TASK_DATA_ERROR


async def test_restart_of_the_server_loses_the_session(environment):
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        await environment.stop()
        await environment.start()
        assert (await session.act(OBSERVE)).failure.kind in (
            FailureKind.SESSION_LOST,
            FailureKind.ENVIRONMENT_DISCONNECTED,
        )


BLOCKED = "Verify you are human"


async def test_own_page_that_shows_a_human_check_is_the_environments_failure(environment):
    environment.site[START] = Page("Shop", BLOCKED)
    chosen = settings(environment)
    async with BrowserSession(chosen, EnvironmentGate(chosen), ["verify you are human"]) as session:
        await session.seed(START, SPEC)
        failure = (await session.act(OBSERVE)).failure
        assert (failure.kind, session.failure) == (FailureKind.PAGE_BLOCKED, failure)
        assert BLOCKED in failure.evidence
        assert (await session.verify()).failure is failure


@pytest.mark.parametrize("typed", [BLOCKED, "shoes"])
async def test_human_check_that_the_policy_wrote_itself_is_an_ordinary_page(environment, typed):
    environment.site[START] = Page("Shop", "Welcome", (Field("q"),))
    chosen = settings(environment)
    async with BrowserSession(chosen, EnvironmentGate(chosen), DEFAULT_BLOCKED_PATTERNS) as session:
        await session.seed(START, SPEC)
        await session.act(OBSERVE)
        await session.act(type_text(0, typed))
        environment.site[START] = Page("Shop", f"No results for {BLOCKED}")
        failure = (await session.act(navigate(START))).failure
    assert (failure and failure.kind) == (None if typed == BLOCKED else FailureKind.PAGE_BLOCKED)


async def test_without_patterns_no_page_is_taken_for_a_human_check(environment):
    environment.site[START] = Page("Shop", BLOCKED)
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        assert (await session.act(OBSERVE)).failure is None


async def test_retry_after_of_the_server_comes_with_the_failure(environment):
    fault = Fault(Do.STATUS, path=SEED_PATH, status=429, text="too many sessions", retry_after="7")
    environment.faults.append(fault)
    async with session_for(environment) as session:
        assert (await session.seed(START, SPEC)).retry_after_s == 7.0


async def test_last_call_and_whether_a_browser_was_opened_are_known_at_the_end(environment):
    environment.faults.append(Fault(Do.STATUS, path=SEED_PATH, session=2))
    async with session_for(environment) as played:
        assert (played.last_call, played.opened) == ("", False)
        await played.seed(START, SPEC)
        assert (played.last_call, played.opened) == ("seed", True)
        await played.act(OBSERVE)
        assert played.last_call == "observe"
        await played.act(CLICK)
        await played.verify()
    async with session_for(environment) as spoiled:
        await spoiled.seed(START, SPEC)
        await spoiled.act(OBSERVE)
    assert (played.last_call, played.opened) == ("verify", True)
    assert (spoiled.last_call, spoiled.opened) == ("seed", False), "a call that was not made counts"


async def test_seed_is_not_repeated_for_any_other_failure(environment):
    environment.faults.append(Fault(Do.STATUS, path=SEED_PATH, text="Error('Page.goto: net::ERR_EMPTY_RESPONSE')"))
    async with session_for(environment) as session:
        assert (await session.seed(START, SPEC)).kind is FailureKind.START_PAGE_FAILED
    assert environment.seen.paths().count(SEED_PATH) == 1


def test_actions_are_calls_of_the_contract():
    assert {str(name) for name in ActionName} < {str(call) for call in rollout_failures.Call}
