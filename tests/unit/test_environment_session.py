"""A browser session keeps its promises whatever the environment does; against the fake environment, over real HTTP."""

import asyncio
from contextlib import suppress

import pytest

import environment_gate
import rollout_failures
from environment_session import ActionName, BrowserAction, BrowserSession, EnvironmentGate
from recipe_settings import RecipeSettings, SettingsError
from rollout_failures import FailureKind
from tests.fake_environment import Do, FakeEnvironment, Fault
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
ACTIONS = [
    OBSERVE,
    BrowserAction(ActionName.NAVIGATE, url=START),
    CLICK,
    BrowserAction(ActionName.TYPE, element_id=0, text="x"),
    FINISH,
]
OBSERVE_PATH, CLOSE_PATH, SEED_PATH, VERIFY_PATH = "/browser_observe", "/close_session", "/seed_session", "/verify"


def navigate(url):
    return BrowserAction(ActionName.NAVIGATE, url=url)


def settings(environment, **changes):
    """Return settings with room for a slow machine; a test shortens the one deadline that it is about."""
    values = {name: 20.0 for name in ("seed_timeout_s", "act_timeout_s", "verify_timeout_s", "close_timeout_s")}
    return RecipeSettings(environment_url=environment.url, **{**values, **changes})


def session_for(environment, gate=None, **changes):
    chosen = settings(environment, **changes)
    return BrowserSession(chosen, gate or EnvironmentGate(chosen))


@pytest.fixture
async def environment():
    async with FakeEnvironment(SITE) as fake:
        yield fake


@pytest.fixture
def quick_probes(monkeypatch):
    monkeypatch.setattr(environment_gate, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(environment_gate, "_LONGEST_BACKOFF_S", 0.02)


async def cancel(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


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


# Closing


async def fail(session):
    raise RuntimeError("the rollout broke")


async def wait_for_ever(session):
    await asyncio.Event().wait()


@pytest.mark.parametrize("ending", [fail, wait_for_ever], ids=["exception", "cancellation"])
async def test_session_is_closed_however_the_rollout_ends(environment, ending):
    seeded = asyncio.Event()

    async def rollout():
        async with session_for(environment) as session:
            await session.seed(START, SPEC)
            seeded.set()
            await ending(session)

    task = asyncio.create_task(rollout())
    await seeded.wait()
    if ending is wait_for_ever:
        task.cancel()
    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        await task
    assert environment.open_sessions == set()
    assert environment.seen.paths() == [SEED_PATH, CLOSE_PATH]


@pytest.mark.parametrize(
    "fault", [Fault(Do.HANG, path=CLOSE_PATH), Fault(Do.STATUS, path=CLOSE_PATH), Fault(Do.DISCONNECT, path=CLOSE_PATH)]
)
async def test_close_that_goes_wrong_does_not_lose_the_sample(environment, fault):
    environment.faults.append(fault)
    chosen = settings(environment, close_timeout_s=0.1, max_open_sessions=1)
    gate = EnvironmentGate(chosen)
    for _ in range(2):  # the second session needs the slot of the first
        async with BrowserSession(chosen, gate) as session:
            await session.seed(START, SPEC)
            verdict = await session.verify()
        assert verdict.reward == 0.0


@pytest.mark.parametrize("path", [SEED_PATH, VERIFY_PATH])
async def test_cancelled_seed_or_verify_runs_to_its_end_and_is_then_closed(environment, path):
    environment.faults.append(Fault(Do.HANG, path=path))
    chosen = settings(environment, close_timeout_s=0.1, max_open_sessions=1)
    gate = EnvironmentGate(chosen)

    async def rollout():
        async with BrowserSession(chosen, gate) as session:
            await session.seed(START, SPEC)
            await session.verify()

    task = asyncio.create_task(rollout())
    await environment.until(lambda seen: path in seen.paths())
    await cancel(task)
    assert CLOSE_PATH not in environment.seen.paths(), "closed under a call that is still under way"
    late = asyncio.create_task(BrowserSession(chosen, gate).__aenter__())
    assert await asyncio.wait({late}, timeout=0.05) == (set(), {late}), "the slot is free though the browser is not"
    environment.release()
    await environment.until(lambda seen: CLOSE_PATH in seen.paths())
    await (await late).__aexit__(None, None, None)
    assert await gate.drain(20.0) == 0
    assert environment.open_sessions == set()


async def test_call_that_the_caller_gave_up_on_is_not_followed_by_another(environment):
    environment.faults.append(Fault(Do.HANG, path=OBSERVE_PATH))
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        task = asyncio.create_task(session.act(OBSERVE))
        await environment.until(lambda seen: OBSERVE_PATH in seen.paths())
        await cancel(task)
        assert (await session.act(OBSERVE)).failure.kind is FailureKind.ACT_TIMEOUT
        assert (await session.verify()).failure.kind is FailureKind.ACT_TIMEOUT
    assert environment.seen.paths() == [SEED_PATH, OBSERVE_PATH, CLOSE_PATH]


async def test_two_calls_on_one_session_run_one_after_the_other(environment):
    environment.faults.append(Fault(Do.HANG, path=OBSERVE_PATH))
    async with session_for(environment) as session:
        await session.seed(START, SPEC)
        acts = asyncio.gather(session.act(OBSERVE), session.act(OBSERVE), session.verify())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.until(lambda seen: len(seen.calls) > 2), timeout=0.1)
        environment.release()
        await acts
    assert environment.seen.overlapping == []


# The gate


async def test_no_more_sessions_are_open_than_the_cap(environment):
    chosen = settings(environment, max_open_sessions=2)
    gate = EnvironmentGate(chosen)

    async def rollout():
        async with BrowserSession(chosen, gate) as session:
            await session.seed(START, SPEC)
            await session.act(OBSERVE)
        return session.waiting_s

    waits = await asyncio.gather(*(rollout() for _ in range(6)))
    assert environment.seen.peak_open == 2
    assert environment.seen.released == {1, 2, 3, 4, 5, 6}
    assert max(waits) > 0


async def test_no_more_seeds_and_verifies_are_under_way_than_the_cap(environment):
    environment.faults += [Fault(Do.HANG, path=SEED_PATH), Fault(Do.HANG, path=VERIFY_PATH)]
    chosen = settings(environment, max_open_sessions=6, max_concurrent_seeds=2)
    gate = EnvironmentGate(chosen)

    async def rollout():
        async with BrowserSession(chosen, gate) as session:
            await session.seed(START, SPEC)
            return (await session.verify()).reward

    rollouts = asyncio.gather(*(rollout() for _ in range(6)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(environment.until(lambda seen: len(seen.calls) > 2), timeout=0.1)
    environment.release()
    assert await rollouts == [0.0] * 6
    assert environment.seen.peak_opening == 2


async def test_waiting_for_a_seed_slot_can_be_cancelled(environment):
    environment.faults.append(Fault(Do.HANG, path=SEED_PATH, session=1))
    chosen = settings(environment, max_concurrent_seeds=1)
    gate = EnvironmentGate(chosen)
    async with BrowserSession(chosen, gate) as one, BrowserSession(chosen, gate) as two:
        first = asyncio.create_task(one.seed(START, SPEC))
        await environment.until(lambda seen: len(seen.calls) == 1)
        second = asyncio.create_task(two.seed(START, SPEC))
        assert await asyncio.wait({second}, timeout=0.05) == (set(), {second})
        await cancel(second)
        environment.release()
        assert await first is None
        assert await two.seed(START, SPEC) is None, "the cancelled wait kept the slot"


async def test_sessions_wait_out_an_outage_behind_one_probe(environment, quick_probes, monkeypatch):
    probes, most, probed = 0, 0, asyncio.Event()
    answers = EnvironmentGate._answers

    async def counted(gate):
        nonlocal probes, most
        probes += 1
        most = max(most, probes)
        probed.set()
        answer = await answers(gate)
        probes -= 1
        return answer

    monkeypatch.setattr(EnvironmentGate, "_answers", counted)
    chosen = settings(environment, max_open_sessions=5)
    gate = EnvironmentGate(chosen)
    await environment.stop()

    async def rollout():
        async with BrowserSession(chosen, gate) as session:
            return await session.seed(START, SPEC), session.waiting_s

    rollouts = asyncio.gather(*(rollout() for _ in range(5)))
    await probed.wait()
    assert gate.down
    await environment.start()
    results = await rollouts
    assert [failure for failure, _ in results] == [None] * 5
    assert all(waiting_s > 0 for _, waiting_s in results)
    assert most == 1
    assert not gate.down


async def test_outage_beyond_patience_fails_the_seed_and_later_seeds_at_once(environment, quick_probes):
    chosen = settings(environment, outage_patience_s=0.2)
    gate = EnvironmentGate(chosen)
    await environment.stop()
    async with BrowserSession(chosen, gate) as session:
        failure = await session.seed(START, SPEC)
        assert (failure.kind, failure.retryable) == (FailureKind.ENVIRONMENT_DOWN, False)
        assert session.waiting_s >= 0.2
        assert environment.url in failure.evidence
    async with BrowserSession(chosen, gate) as late:
        assert (await late.seed(START, SPEC)).kind is FailureKind.ENVIRONMENT_DOWN
        assert late.waiting_s < 0.2
    await environment.start()
    async with BrowserSession(chosen, gate) as recovered:
        assert await recovered.seed(START, SPEC) is None


async def test_seed_is_not_repeated_for_any_other_failure(environment):
    environment.faults.append(Fault(Do.STATUS, path=SEED_PATH, text="Error('Page.goto: net::ERR_EMPTY_RESPONSE')"))
    async with session_for(environment) as session:
        assert (await session.seed(START, SPEC)).kind is FailureKind.START_PAGE_FAILED
    assert environment.seen.paths().count(SEED_PATH) == 1


def test_backoff_doubles_up_to_a_cap_with_jitter():
    for attempt, longest in enumerate([0.5, 1, 2, 4, 8, 15, 15, 15]):
        waits = [environment_gate.backoff_s(attempt) for _ in range(50)]
        assert longest / 2 <= min(waits) <= max(waits) <= longest
        assert len(set(waits)) > 1
    assert environment_gate.backoff_s(10_000) <= 15


async def test_gate_is_shared_within_one_event_loop():
    assert EnvironmentGate.shared(RecipeSettings()) is EnvironmentGate.shared(RecipeSettings())


async def test_gates_of_two_event_loops_differ():
    async def shared():
        return EnvironmentGate.shared(RecipeSettings())

    mine = await shared()
    assert await asyncio.to_thread(lambda: asyncio.run(shared())) is not mine


def test_actions_are_calls_of_the_contract():
    assert {str(name) for name in ActionName} < {str(call) for call in rollout_failures.Call}
