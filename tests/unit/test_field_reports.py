"""What went wrong for people with neighbouring systems, tried on this recipe's session, classifier and call reader.

Each test names the public report that its input comes from. The failures are told with their kind, whose fault each
is, whether a fresh attempt may help, and whether this attempt is over.
"""

import asyncio
import time

import pytest

from environment_session import ActionName, BrowserAction, BrowserSession, EnvironmentGate
from recipe_settings import RecipeSettings
from rollout_failures import DEFAULT_BLOCKED_PATTERNS, FailureKind, failure_of
from tests.failure_columns import ENVIRONMENT, MEASUREMENT, MEASUREMENT_AGAIN, POLICY, columns
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import Field, Link, Page
from tool_calls import RawCall, UnusableCall, read_hermes_calls, to_action

START = "http://shop.test/"
SITE = {
    START: Page("Shop", "Welcome", (Link("Cart", "/cart"), Field("q"))),
    "http://shop.test/cart": Page("Cart", "Empty"),
    "http://shop.test/check": Page("Shop", "Verify you are human"),
    "http://elsewhere.test/": Page("Elsewhere", "Verify you are human"),
}
OBSERVE = BrowserAction(ActionName.OBSERVE)
FINISH = BrowserAction(ActionName.FINISH, answer="done")
SEED_PATH, OBSERVE_PATH, VERIFY_PATH, CLOSE_PATH = "/seed_session", "/browser_observe", "/verify", "/close_session"
HANG_S = 0.3


def session_for(environment, gate=None, **changes):
    values = {name: 20.0 for name in ("seed_timeout_s", "act_timeout_s", "verify_timeout_s", "close_timeout_s")}
    settings = RecipeSettings(environment_url=environment.url, **{**values, **changes})
    return BrowserSession(settings, gate or EnvironmentGate(settings), blocked_patterns=DEFAULT_BLOCKED_PATTERNS)


async def play(session, start=START, spec=None, actions=(OBSERVE, FINISH)):
    """Return the verdict of an episode that follows a script to its end, whatever happens on the way."""
    if await session.seed(start, spec or {"answer_equals": "done"}) is None:
        for action in actions:
            await session.act(action)
    return await session.verify()


@pytest.fixture
async def environment():
    async with FakeEnvironment(SITE) as fake:
        yield fake


ZERO = Fault(Do.ANSWER, path=VERIFY_PATH, body={"reward": 0.0})
MASKED = {"reward": 1.0, "mask_sample": True}

SPOILED = {
    "session lost at reset, verify says 0 | https://github.com/NVIDIA-NeMo/Gym/issues/2921": (
        [Fault(Do.LOSE_SESSION, step=1), ZERO],
        FailureKind.SESSION_LOST,
        ENVIRONMENT,
    ),
    "masked sample with a kind of its own | https://github.com/NVIDIA-NeMo/Gym/issues/2608": (
        [Fault(Do.ANSWER, path=VERIFY_PATH, body={**MASKED, "failure_kind": "new:x"})],
        FailureKind.REWARD_MASKED,
        MEASUREMENT_AGAIN,
    ),
    "masked in the older place | https://github.com/NVIDIA-NeMo/Gym/issues/2608": (
        [Fault(Do.ANSWER, path=VERIFY_PATH, body={"reward": 1.0, "instance_config": {"mask_sample": True}})],
        FailureKind.REWARD_MASKED,
        MEASUREMENT_AGAIN,
    ),
    "kind in the older place | https://github.com/NVIDIA-NeMo/Gym/issues/2608": (
        [
            Fault(
                Do.ANSWER,
                path=VERIFY_PATH,
                body={"reward": 0.0, "instance_config": {"mask_sample": True, "failure_kind": "session_expired"}},
            )
        ],
        FailureKind.SESSION_LOST,
        ENVIRONMENT,
    ),
    "error without a page | https://github.com/PrimeIntellect-ai/prime-rl/pull/2308": (
        [Fault(Do.ERROR, step=1, text="provider said: out of cheese"), ZERO],
        FailureKind.UNCLASSIFIED,
        MEASUREMENT,
    ),
    "500 Already borrowed | https://github.com/PrimeIntellect-ai/prime-rl/pull/1837": (
        [Fault(Do.STATUS, step=1, text="Already borrowed"), ZERO],
        FailureKind.SERVER_ERROR,
        ENVIRONMENT,
    ),
    "session expires while the policy thinks | https://github.com/huggingface/OpenEnv/pull/362": (
        [Fault(Do.LOSE_SESSION, step=2), ZERO],
        FailureKind.SESSION_LOST,
        ENVIRONMENT,
    ),
    "step that never answers | https://github.com/ServiceNow/AgentLab/issues/231": (
        [Fault(Do.HANG, step=1), ZERO],
        FailureKind.ACT_TIMEOUT,
        ENVIRONMENT,
    ),
    "provider out of sessions | https://github.com/browser-use/browser-use/issues/4032": (
        [Fault(Do.STATUS, path=SEED_PATH, status=429, text="Too many concurrent active sessions"), ZERO],
        FailureKind.PROVIDER_FULL,
        ENVIRONMENT,
    ),
    "provider out of sessions, told in a 500 | https://github.com/browser-use/browser-use/issues/4032": (
        [Fault(Do.STATUS, path=SEED_PATH, text="BrowserSessionError('Too many concurrent active sessions')"), ZERO],
        FailureKind.PROVIDER_FULL,
        ENVIRONMENT,
    ),
}


@pytest.mark.parametrize(("faults", "kind", "want"), SPOILED.values(), ids=SPOILED)
async def test_spoiled_rollout_has_a_failure_and_no_reward(environment, faults, kind, want):
    environment.faults += faults
    async with session_for(environment, act_timeout_s=HANG_S if kind is FailureKind.ACT_TIMEOUT else 20.0) as session:
        verdict = await play(session)
    assert (verdict.reward, verdict.failure.kind, columns(verdict.failure)) == (None, kind, want)


# https://github.com/NVIDIA-NeMo/Gym/issues/2921
async def test_eleven_orphan_sessions_of_twelve_leave_one_reward(environment):
    environment.faults += [Fault(Do.LOSE_SESSION, session=number, step=1) for number in range(1, 12)]
    environment.faults += [
        Fault(Do.ANSWER, path=VERIFY_PATH, session=number, body={"reward": 0.0}) for number in range(1, 12)
    ]
    verdicts = []
    for _ in range(12):
        async with session_for(environment) as session:
            verdicts.append(await play(session))
    assert [verdict.reward for verdict in verdicts] == [None] * 11 + [1.0]
    assert {verdict.failure.kind for verdict in verdicts[:11]} == {FailureKind.SESSION_LOST}


# https://github.com/NVIDIA-NeMo/Gym/issues/2608
@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_reward_that_nobody_masked_counts_zero_included(environment, reward):
    environment.faults.append(Fault(Do.ANSWER, path=VERIFY_PATH, body={"reward": reward, "mask_sample": False}))
    async with session_for(environment) as session:
        verdict = await play(session)
    assert (verdict.reward, verdict.failure) == (reward, None)


# https://github.com/NVIDIA-NeMo/Gym/pull/1865
async def test_done_is_reported_and_nothing_that_follows_it_changes_the_score(environment):
    async with session_for(environment) as session:
        await session.seed(START, {"url_contains": "shop.test/cart"})
        finished = await session.act(FINISH)
        assert (finished.observation, finished.done, finished.failure) == ("", True, None)
        onward = await session.act(BrowserAction(ActionName.NAVIGATE, url="http://shop.test/cart"))
        assert (onward.failure, onward.done) == (None, False)
        assert (await session.verify()).reward == 0.0


# https://github.com/NVIDIA-NeMo/Gym/pull/1865
async def test_done_of_an_action_that_is_no_finish_is_reported_too(environment):
    environment.faults.append(Fault(Do.ANSWER, step=1, body={"observation": "", "done": True}))
    async with session_for(environment) as session:
        await session.seed(START, {"url_contains": "x"})
        step = await session.act(OBSERVE)
    assert (step.done, step.error, step.failure) == (True, None, None)


# https://github.com/NVIDIA-NeMo/Gym/pull/1865 (state of one session seen by the next) and
# https://github.com/NVIDIA-NeMo/Gym/pull/3316 (one cookie for many rollouts)
async def test_next_rollout_begins_without_the_cookie_of_the_one_before(environment):
    async with session_for(environment) as first:
        await first.seed(START, {"url_contains": "cart"})
        await first.act(OBSERVE)
        await first.act(BrowserAction(ActionName.TYPE, element_id=1, text="marker"))
    async with session_for(environment) as second:
        await second.seed(START, {"url_contains": "cart"})
        assert "marker" not in (await second.act(OBSERVE)).observation
    first_calls, second_calls = (environment.seen.paths(number) for number in (1, 2))
    assert first_calls == [SEED_PATH, OBSERVE_PATH, "/browser_type", CLOSE_PATH]
    assert second_calls == [SEED_PATH, OBSERVE_PATH, CLOSE_PATH]


# https://github.com/NVIDIA-NeMo/Gym/issues/2216
async def test_address_where_nothing_listens_is_given_up_at_the_patience_with_a_clear_failure():
    settings = RecipeSettings(environment_url="http://127.0.0.1:1", outage_patience_s=0.3)
    started = time.monotonic()
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        failure = await session.seed(START, {"url_contains": "cart"})
    assert time.monotonic() - started < 20.0
    assert (failure.kind, failure.fault, failure.retryable) == (FailureKind.ENVIRONMENT_DOWN, ENVIRONMENT[0], False)
    assert "http://127.0.0.1:1" in failure.evidence


# https://github.com/NovaSky-AI/SkyRL/issues/1613
async def test_one_broken_session_of_eight_leaves_the_other_seven_alone(environment):
    environment.faults.append(Fault(Do.DISCONNECT, session=3, step=1))
    settings = RecipeSettings(environment_url=environment.url)
    gate = EnvironmentGate(settings)

    async def rollout():
        async with session_for(environment, gate) as session:
            return await play(session)

    verdicts = await asyncio.gather(*(rollout() for _ in range(8)))
    assert sorted(verdict.reward or 0.0 for verdict in verdicts) == [0.0] + [1.0] * 7
    (failure,) = [verdict.failure for verdict in verdicts if verdict.failure]
    assert (failure.kind, columns(failure)) == (FailureKind.ENVIRONMENT_DISCONNECTED, ENVIRONMENT)


# https://github.com/PrimeIntellect-ai/prime-rl/pull/2308
async def test_text_of_an_error_without_a_page_is_kept_as_evidence(environment):
    environment.faults.append(Fault(Do.ERROR, step=1, text="provider said: out of cheese"))
    async with session_for(environment) as session:
        await session.seed(START, {"url_contains": "cart"})
        step = await session.act(OBSERVE)
    assert (step.error, step.failure.evidence) == ("provider said: out of cheese",) * 2


# https://github.com/PrimeIntellect-ai/prime-rl/pull/1837
def test_engine_that_breaks_is_no_fault_of_the_policy():
    failure = failure_of(FailureKind.ENGINE_ERROR, "RuntimeError: Already borrowed")
    assert columns(failure) == ENVIRONMENT


UNREADABLE = {
    "no arguments": ('<tool_call>{"function":"x"}</tool_call>', "wrong_keys"),
    "two objects": ('<tool_call>{"name":"browser","arguments":{}}{"name":"browser"}</tool_call>', "two_objects"),
    "no JSON": ("<tool_call>browser observe</tool_call>", "broken_json"),
    "not closed": ('<tool_call>{"name":"browser","arguments":{"action":"observe"}}', "unclosed_call"),
}


# https://github.com/verl-project/verl/issues/7177
@pytest.mark.parametrize(("reply", "problem"), UNREADABLE.values(), ids=UNREADABLE)
def test_call_that_cannot_be_decoded_is_answered_and_not_only_logged(reply, problem):
    call = read_hermes_calls(reply)
    assert isinstance(call, UnusableCall)
    assert call.problem == problem
    assert call.message


# https://github.com/verl-project/verl/issues/7177
def test_call_of_a_tool_that_does_not_exist_is_answered_too():
    call = to_action(RawCall("x", {}), [])
    assert (call.problem, "browser" in call.message) == ("unknown_tool", True)


# https://github.com/MinorJerry/WebVoyager/issues/11
async def test_human_check_on_the_first_page_is_the_environments_failure(environment):
    async with session_for(environment) as session:
        await session.seed("http://shop.test/check", {"url_contains": "check"})
        failure = (await session.act(OBSERVE)).failure
        assert (failure.kind, columns(failure)) == (FailureKind.PAGE_BLOCKED, ENVIRONMENT)
        assert "Verify you are human" in failure.evidence
        assert (await session.verify()).reward is None


# https://github.com/MinorJerry/WebVoyager/issues/11
async def test_human_check_that_the_policy_walks_to_elsewhere_is_an_ordinary_page(environment):
    async with session_for(environment) as session:
        await session.seed(START, {"url_contains": "cart"})
        step = await session.act(BrowserAction(ActionName.NAVIGATE, url="http://elsewhere.test/"))
        assert ("Verify you are human" in step.observation, step.failure) == (True, None)
        assert (await session.verify()).reward == 0.0


# https://github.com/MinorJerry/WebVoyager/issues/11
@pytest.mark.parametrize("action", [ActionName.TYPE, ActionName.NAVIGATE])
async def test_human_check_that_the_policy_wrote_itself_is_an_ordinary_page(environment, action):
    environment.site["http://shop.test/?q=Verify+you+are+human"] = Page("Results", "None for: Verify you are human")
    echo = BrowserAction(ActionName.NAVIGATE, url="http://shop.test/?q=Verify+you+are+human")
    async with session_for(environment) as session:
        await session.seed(START, {"url_contains": "cart"})
        await session.act(OBSERVE)
        if action is ActionName.TYPE:
            await session.act(BrowserAction(ActionName.TYPE, element_id=1, text="Verify you are human"))
        assert (await session.act(echo)).failure is None
        assert (await session.verify()).reward == 0.0


# https://github.com/huggingface/OpenEnv/pull/362
async def test_connection_that_closes_while_the_policy_thinks_is_opened_again(environment):
    async with session_for(environment) as session:
        await session.seed(START, {"answer_equals": "done"})
        await session.act(OBSERVE)
        await environment.close_idle_connections()
        assert (await session.act(OBSERVE)).failure is None
        await session.act(FINISH)
        assert (await session.verify()).reward == 1.0


# https://github.com/ServiceNow/AgentLab/issues/231
async def test_steps_that_hang_at_once_all_end_and_leave_no_session(environment):
    environment.faults.append(Fault(Do.HANG, path=OBSERVE_PATH))
    settings = RecipeSettings(environment_url=environment.url)
    gate = EnvironmentGate(settings)

    async def rollout():
        async with session_for(environment, gate, act_timeout_s=HANG_S) as session:
            return await play(session)

    verdicts = await asyncio.gather(*(rollout() for _ in range(6)))
    assert [(verdict.reward, verdict.failure.kind) for verdict in verdicts] == [(None, FailureKind.ACT_TIMEOUT)] * 6
    assert await gate.drain(20.0) == 0
    assert environment.open_sessions == set()
    assert environment.seen.released == environment.seen.seeded == {1, 2, 3, 4, 5, 6}


# https://github.com/browser-use/browser-use/issues/4032
async def test_provider_that_is_full_says_when_to_come_back(environment):
    text = "Too many concurrent active sessions"
    environment.faults.append(Fault(Do.STATUS, path=SEED_PATH, status=429, text=text, retry_after="3", times=1))
    async with session_for(environment) as session:
        failure = await session.seed(START, {"url_contains": "cart"})
    assert (failure.kind, columns(failure), failure.retry_after_s) == (FailureKind.PROVIDER_FULL, ENVIRONMENT, 3.0)
    assert text in failure.evidence


# https://github.com/browser-use/browser-use/pull/5811
async def test_sample_survives_a_close_that_never_answers(environment):
    environment.faults.append(Fault(Do.HANG, path=CLOSE_PATH))
    async with session_for(environment, close_timeout_s=0.1) as session:
        verdict = await play(session)
    assert (verdict.reward, verdict.failure) == (1.0, None)


MISTAKES = {
    "dead host of its own making": (
        BrowserAction(ActionName.NAVIGATE, url="http://made-up.test/"),
        "navigation_failed",
    ),
    "element that is not there": (BrowserAction(ActionName.CLICK, element_id=99), "bad_element"),
}


# https://github.com/NVIDIA-NeMo/Gym/issues/2921, the other way round: a mistake is no environment failure
@pytest.mark.parametrize(("action", "kind"), MISTAKES.values(), ids=MISTAKES)
async def test_mistake_of_the_policy_is_scored_and_never_retried(environment, action, kind):
    async with session_for(environment) as session:
        await session.seed(START, {"answer_equals": "done"})
        await session.act(OBSERVE)
        failure = (await session.act(action)).failure
        assert (failure.kind, columns(failure)) == (kind, POLICY)
        await session.act(FINISH)
        assert (await session.verify()).reward == 1.0
