"""BrowserSession against the real server: whole episodes, and every way for a browser or a server to go away."""

import asyncio
import signal

import pytest

from cpu.gym_server import GymServer
from cpu.processes import kill_all
from environment_session import ActionName, BrowserAction, BrowserSession, EnvironmentGate
from recipe_settings import RecipeSettings
from rollout_failures import FailureKind, Fault

pytestmark = pytest.mark.timeout(120)

OBSERVE = BrowserAction(ActionName.OBSERVE)


def settings_for(server: GymServer, **changes: float) -> RecipeSettings:
    return RecipeSettings(environment_url=server.url, outage_patience_s=5.0, **changes)


@pytest.fixture
async def session(server, nothing_left):
    """Return an open session. However its test ends, no browser is left once it is closed."""
    settings = settings_for(server)
    async with BrowserSession(settings, EnvironmentGate(settings)) as opened:
        yield opened
    await nothing_left()


def element(observation: str, label: str) -> int:
    """Return the id of the element whose line ends in the label, as in `  [0] a: next page`."""
    line = next(line for line in observation.splitlines() if line.rstrip().endswith(label))
    return int(line.partition("[")[2].partition("]")[0])


async def test_a_whole_episode_is_scored_by_the_server(session, server, site):
    assert await session.seed(f"{site}/", {"url_contains": "/next?q=hello"}) is None
    seen = await session.act(OBSERVE)
    assert "URL: " + site in seen.observation and "a plain start page" in seen.observation
    typed = await session.act(
        BrowserAction(ActionName.TYPE, element_id=element(seen.observation, "input:"), text="hello")
    )
    assert typed.failure is None
    sent = await session.act(BrowserAction(ActionName.CLICK, element_id=element(typed.observation, "send")))
    assert "this is the next page" in sent.observation
    finished = await session.act(BrowserAction(ActionName.FINISH, answer="sent"))
    assert (finished.done, finished.failure, session.failure) == (True, None, None)
    assert len(server.browser_pids()) == 1
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (1.0, None)
    assert session.environment_s > 0


async def test_a_wrong_answer_is_a_reward_of_zero_and_no_failure(session, site):
    assert await session.seed(f"{site}/", {"answer_equals": "42"}) is None
    await session.act(BrowserAction(ActionName.FINISH, answer="41"))
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (0.0, None)


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (BrowserAction(ActionName.CLICK, element_id=999), FailureKind.BAD_ELEMENT),
        (BrowserAction(ActionName.NAVIGATE, url="http://no-such-host.invalid/"), FailureKind.NAVIGATION_FAILED),
        (BrowserAction(ActionName.NAVIGATE, url="not an address"), FailureKind.BAD_URL),
    ],
    ids=["bad element", "unresolvable host", "bad address"],
)
async def test_a_mistake_of_the_policy_does_not_end_the_episode(session, site, action, kind):
    assert await session.seed(f"{site}/", {"url_contains": "/next"}) is None
    await session.act(OBSERVE)
    result = await session.act(action)
    assert (result.failure.kind, result.failure.fault, result.failure.fatal) == (kind, Fault.POLICY, False)
    assert result.error and session.failure is None
    onward = await session.act(BrowserAction(ActionName.NAVIGATE, url=f"{site}/next"))
    # Asked at once, Chromium may still be on its way to the error page of the address that failed.
    while onward.failure is not None and onward.failure.kind is FailureKind.PAGE_CHANGED:
        onward = await session.act(BrowserAction(ActionName.NAVIGATE, url=f"{site}/next"))
    assert onward.failure is None
    assert (await session.verify()).reward == 1.0


async def test_a_killed_browser_is_latched_for_the_rest_of_the_episode(session, server, site, browsers_gone):
    assert await session.seed(f"{site}/", {"answer_equals": "x"}) is None
    await session.act(OBSERVE)
    kill_all(server.browser_pids())
    await browsers_gone()
    first = await session.act(OBSERVE)
    assert (first.failure.kind, first.failure.fatal) == (FailureKind.BROWSER_DIED, True)
    # From here on the server itself would answer as if nothing had happened.
    later = await session.act(BrowserAction(ActionName.FINISH, answer="x"))
    assert (later.failure, later.done) == (first.failure, False)
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (None, first.failure)


async def test_a_browser_killed_before_scoring_is_no_reward(session, server, site, browsers_gone):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    kill_all(server.browser_pids())
    await browsers_gone()
    verdict = await session.verify()
    assert verdict.reward is None
    assert (verdict.failure.kind, verdict.failure.fault) == (FailureKind.BROWSER_DIED, Fault.ENVIRONMENT)


async def test_a_killed_server_is_the_environments_fault(session, server, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await asyncio.to_thread(server.kill)
    try:
        result = await session.act(OBSERVE)
        assert result.failure.kind in (FailureKind.ENVIRONMENT_DISCONNECTED, FailureKind.ENVIRONMENT_UNREACHABLE)
        assert (result.failure.fault, result.failure.fatal) == (Fault.ENVIRONMENT, True)
        assert (await session.verify()).reward is None
    finally:
        await asyncio.to_thread(server.start)


async def test_a_server_that_stays_away_ends_the_wait_at_its_patience(server):
    settings = RecipeSettings(environment_url=server.url, outage_patience_s=0.5)
    await asyncio.to_thread(server.kill)
    try:
        async with BrowserSession(settings, EnvironmentGate(settings)) as session:
            failure = await session.seed("about:blank", {"url_contains": "x"})
        assert (failure.kind, failure.fault) == (FailureKind.ENVIRONMENT_DOWN, Fault.ENVIRONMENT)
    finally:
        await asyncio.to_thread(server.start)


async def test_a_seed_waits_for_a_server_that_comes_back(server, site):
    settings = RecipeSettings(environment_url=server.url, outage_patience_s=60.0)
    await asyncio.to_thread(server.kill)
    try:
        async with BrowserSession(settings, EnvironmentGate(settings)) as session:
            seeding = asyncio.create_task(session.seed(f"{site}/", {"dom_contains": "plain"}))
            await asyncio.to_thread(server.start)
            assert await seeding is None
            assert (await session.verify()).reward == 1.0
    finally:
        if not server.running:
            await asyncio.to_thread(server.start)


async def test_a_restart_in_the_middle_of_an_episode_loses_its_session(session, server, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    await session.act(OBSERVE)
    await asyncio.to_thread(server.restart)  # the loop must see the connection close meanwhile, as in a rollout
    result = await session.act(OBSERVE)
    assert (result.failure.kind, result.failure.fault) == (FailureKind.SESSION_LOST, Fault.ENVIRONMENT)
    verdict = await session.verify()
    assert (verdict.reward, verdict.failure) == (None, result.failure)


async def test_a_session_whose_observe_never_answers_is_closed_and_freed(server, site, nothing_left):
    settings = settings_for(server, act_timeout_s=3.0)
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        assert await session.seed(f"{site}/stuck", {"dom_contains": "stuck"}) is None
        assert len(server.browser_pids()) == 1
        result = await act_until_it_hangs(session)
        assert (result.failure.kind, result.failure.fatal) == (FailureKind.ACT_TIMEOUT, True)
        await nothing_left()  # at once, not only when the session ends
    assert (await session.verify()).reward is None


async def act_until_it_hangs(session: BrowserSession):
    """Return the first observe that fails; the page needs a moment before it leaves for the address that hangs."""
    while (result := await session.act(OBSERVE)).failure is None:
        pass
    return result


async def test_scoring_twice_gives_the_first_verdict_again(session, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    first = await session.verify()
    assert first.reward == 1.0
    assert await session.verify() == first


async def test_a_start_page_that_refuses_connections_is_not_the_policys_fault(session):
    failure = await session.seed("http://127.0.0.1:9/", {"dom_contains": "x"})
    assert (failure.kind, failure.fault) == (FailureKind.START_PAGE_FAILED, Fault.ENVIRONMENT)


@pytest.mark.parametrize("when", ["seeding", "scoring"])
async def test_a_rollout_cancelled_in_a_long_call_leaves_no_browser(server, held_site, when, nothing_left):
    settings = settings_for(server)
    start_page = "/held" if when == "seeding" else "/leaving"

    async def rollout() -> None:
        async with BrowserSession(settings, EnvironmentGate(settings)) as session:
            assert await session.seed(held_site.url + start_page, {"dom_contains": "held"}) is None
            await asyncio.to_thread(held_site.asked_for_held.wait)  # from here on, the page is on its way elsewhere
            await session.verify()

    task = asyncio.create_task(rollout())
    await asyncio.to_thread(held_site.asked_for_held.wait)
    _, pending = await asyncio.wait({task}, timeout=1.0)
    assert pending, "the call was to wait for the page that is held"
    task.cancel()
    held_site.release_held.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_left()


async def test_several_sessions_are_apart_and_all_close(server, site, nothing_left):
    settings = settings_for(server)
    gate = EnvironmentGate(settings)

    async def episode(path: str) -> tuple[float | None, bool]:
        async with BrowserSession(settings, gate) as session:
            assert await session.seed(site + path, {"url_contains": path}) is None
            seen = await session.act(OBSERVE)
            return (await session.verify()).reward, f"{site}{path}\n" in seen.observation

    assert await asyncio.gather(*map(episode, ["/", "/next", "/next?n=2"])) == [(1.0, True)] * 3
    await nothing_left()


async def test_a_stopped_server_leaves_no_process_of_an_open_session(session, server, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    pids = server.browser_pids()
    kill_all([server.pid], signal.SIGKILL)
    await asyncio.to_thread(server.stop)
    try:
        assert pids and server.browser_pids() == []
    finally:
        await asyncio.to_thread(server.start)
