"""However a rollout ends, its browser is closed, no call is cut off and no slot is lost."""

import asyncio
from contextlib import suppress

import pytest

from environment_gate import EnvironmentGate
from environment_session import BrowserSession
from rollout_failures import FailureKind
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.sessions import (
    CLOSE_PATH,
    OBSERVE,
    OBSERVE_PATH,
    SEED_PATH,
    SITE,
    SPEC,
    START,
    VERIFY_PATH,
    session_for,
    settings,
)


@pytest.fixture
async def environment():
    async with FakeEnvironment(SITE) as fake:
        yield fake


async def cancel(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


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


async def test_session_that_asked_nothing_closes_nothing_and_gives_its_slot_back(environment):
    chosen = settings(environment, max_open_sessions=1)
    gate = EnvironmentGate(chosen)
    for _ in range(2):
        async with BrowserSession(chosen, gate):
            pass
    assert environment.seen.calls == []


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
