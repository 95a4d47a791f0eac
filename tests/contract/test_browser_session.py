"""BrowserSession against the real server: whole episodes, outages, and sessions that always close."""

import asyncio
import signal

import pytest

from cpu.processes import kill_all
from environment_session import ActionName, BrowserAction, BrowserSession, EnvironmentGate
from recipe_settings import RecipeSettings
from rollout_failures import FailureKind, Fault
from tests.contract.episodes import OBSERVE, element, settings_for

pytestmark = pytest.mark.timeout(120)


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


async def test_scoring_twice_gives_the_first_verdict_again(session, site):
    assert await session.seed(f"{site}/", {"dom_contains": "plain"}) is None
    first = await session.verify()
    assert first.reward == 1.0
    assert await session.verify() == first


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
