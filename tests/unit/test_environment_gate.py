"""Sessions behind one gate: caps and outages, against the fake environment, over real HTTP."""

import asyncio
import time
from contextlib import suppress

import pytest

import gate_core
from environment_coordinator import coordinator_for_driver
from environment_gate import EnvironmentGate, GateCounters, Pass
from environment_session import BrowserSession
from recipe_settings import RecipeSettings
from rollout_failures import Call, FailureKind, failure_of
from rollout_stats import RolloutReport
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.sessions import CLOSE_PATH, OBSERVE, SEED_PATH, SITE, SPEC, START, VERIFY_PATH, settings


@pytest.fixture
async def environment():
    async with FakeEnvironment(SITE) as fake:
        yield fake


@pytest.fixture
def quick_trials(monkeypatch):
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(gate_core, "_LONGEST_BACKOFF_S", 0.02)


async def cancel(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


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


async def seeded(chosen, gate):
    """Return how one session's seed ended and how long it waited at the gate."""
    async with BrowserSession(chosen, gate) as session:
        return await session.seed(START, SPEC), session.waiting_s


async def test_sessions_wait_out_an_outage_while_one_seed_at_a_time_is_tried(environment, quick_trials, monkeypatch):
    tried, most, trials, three_tried = 0, 0, 0, asyncio.Event()
    call = BrowserSession._call

    async def counted(session, *arguments):
        nonlocal tried, most, trials
        tried, trials = tried + 1, trials + 1
        if trials > 5:  # the five seeds that found the server gone
            most = max(most, tried)
        if trials > 8:
            three_tried.set()
        try:
            return await call(session, *arguments)
        finally:
            tried -= 1

    chosen = settings(environment, max_open_sessions=5, max_concurrent_seeds=5)
    gate = EnvironmentGate(chosen)
    await environment.stop()
    monkeypatch.setattr(BrowserSession, "_call", counted)
    rollouts = asyncio.gather(*(seeded(chosen, gate) for _ in range(5)))
    await three_tried.wait()
    assert most == 1
    await environment.start()
    results = await rollouts
    assert [failure for failure, _ in results] == [None] * 5
    assert all(waiting_s > 0 for _, waiting_s in results)


async def test_outage_beyond_patience_fails_the_seed_and_later_seeds_at_once(environment, quick_trials):
    chosen = settings(environment, outage_patience_s=0.2)
    gate = EnvironmentGate(chosen)
    await environment.stop()
    failure, waiting_s = await seeded(chosen, gate)
    assert (failure.kind, failure.retryable) == (FailureKind.ENVIRONMENT_DOWN, False)
    assert waiting_s > 0.1
    assert environment.url in failure.evidence
    late, waiting_s = await seeded(chosen, gate)
    assert late.kind is FailureKind.ENVIRONMENT_DOWN
    assert waiting_s < 0.2
    await environment.start()
    # Seeds are refused at once for as long as the last trial took.
    async with asyncio.timeout(20):
        while (await seeded(chosen, gate))[0] is not None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "may_leave", "asked", "turned_away"),
    [
        (Pass.REFUSED, False, 0, Pass.REFUSED),
        (Pass.LAST_CHANCE, False, 1, Pass.REFUSED),
        (Pass.REFUSED, True, 0, Pass.REFUSED),
        (Pass.LAST_CHANCE, True, 1, Pass.REFUSED),
        (Pass.ELSEWHERE, True, 0, Pass.ELSEWHERE),
        # The gate is open: other machines reach the server.
        (Pass.GO, True, 1, Pass.ELSEWHERE),
    ],
)
async def test_seed_beyond_patience_or_with_another_server_asks_this_one_at_most_once(
    environment, monkeypatch, answer, may_leave, asked, turned_away
):
    asks = []
    call = BrowserSession._call

    async def counted(session, name, *arguments):
        asks.append(name)
        return await call(session, name, *arguments)

    async def answered(gate, leaves):
        assert leaves is may_leave
        return 1, answer

    monkeypatch.setattr(BrowserSession, "_call", counted)
    monkeypatch.setattr(EnvironmentGate, "take_seed_slot", answered)
    chosen = settings(environment)
    await environment.stop()
    async with BrowserSession(chosen, EnvironmentGate(chosen), may_leave=may_leave) as session:
        failure = await asyncio.wait_for(session.seed(START, SPEC), 20.0)
    assert (failure.kind, session.turned_away) == (FailureKind.ENVIRONMENT_DOWN, turned_away)
    assert asks.count(Call.SEED) == asked


async def test_seeds_that_fail_in_a_row_make_the_next_one_wait(environment, monkeypatch):
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 0.4)
    environment.faults.append(Fault(Do.STATUS, path=SEED_PATH, text="BrowserType.launch", times=3))
    chosen = settings(environment, outage_after_seeds=3)
    gate = EnvironmentGate(chosen)
    started = time.monotonic()
    results = [await seeded(chosen, gate) for _ in range(4)]
    assert [failure and failure.kind for failure, _ in results] == [FailureKind.BROWSER_LAUNCH_FAILED] * 3 + [None]
    # Since the start: on a busy machine closing a session takes up some of the wait.
    assert time.monotonic() - started > 0.15


async def test_gate_stays_closed_for_as_long_as_the_server_asks(environment, quick_trials):
    fault = Fault(Do.STATUS, path=SEED_PATH, status=429, text="too many sessions", retry_after="1", times=1)
    environment.faults.append(fault)
    chosen = settings(environment, outage_after_seeds=1)
    gate = EnvironmentGate(chosen)
    started = time.monotonic()
    failure, _ = await seeded(chosen, gate)
    assert failure.kind is FailureKind.PROVIDER_FULL
    failure, _ = await seeded(chosen, gate)
    assert failure is None
    assert time.monotonic() - started > 0.9


@pytest.mark.parametrize("kind", [FailureKind.TASK_DATA_ERROR, FailureKind.UNCLASSIFIED])
async def test_seeds_that_fail_by_no_fault_of_the_environment_close_no_gate(monkeypatch, kind):
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 600.0)
    gate = EnvironmentGate(RecipeSettings(outage_after_seeds=1))
    for _ in range(3):
        slot, answer = await gate.take_seed_slot()
        assert answer is Pass.GO
        gate.note_seed(slot, failure_of(kind, "seed"))


async def test_verify_is_not_held_back_by_an_outage(environment):
    chosen = settings(environment)
    gate = EnvironmentGate(chosen)
    async with BrowserSession(chosen, gate) as session:
        await session.seed(START, SPEC)
        slot, _ = await gate.take_seed_slot()
        gate.note_seed(slot, failure_of(FailureKind.ENVIRONMENT_UNREACHABLE, "refused"))
        assert (await session.verify()).reward == 0.0


async def test_one_who_is_cancelled_in_the_moment_of_being_let_through_keeps_no_slot(environment):
    gate = EnvironmentGate(settings(environment, max_open_sessions=1))
    held = await gate.take_open_slot()
    waiting = asyncio.create_task(gate.take_open_slot())
    await asyncio.wait({waiting}, timeout=0.01)
    gate.free_open_slot(held, closed=False)  # the answer is there, the task has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(gate.take_open_slot(), 20.0)


async def test_sessions_that_are_opened_and_closed_are_counted_for_the_driver(environment):
    environment.faults += [
        Fault(Do.STATUS, path=SEED_PATH, session=2),
        Fault(Do.STATUS, path=CLOSE_PATH, session=3),
        Fault(Do.STATUS, path=CLOSE_PATH, session=4),
    ]
    chosen = settings(environment, max_open_sessions=1)
    gate = EnvironmentGate.shared(chosen)
    for verified in (True, False, False, True, False):
        async with BrowserSession(chosen, gate) as session:
            await session.seed(START, SPEC)
            if verified:
                await session.verify()
    # The second was never opened; the third's close went unanswered, and so did the fourth's, after its verify.
    assert coordinator_for_driver(chosen).counters() == GateCounters(opened=4, closed=3, open_now=0, down_s=0.0)


async def test_reports_reach_the_driver_of_the_same_process_from_every_event_loop():
    chosen = RecipeSettings(environment_url="http://reports.test:1")
    reports = [RolloutReport(3, uid, 0, 1.0, ()) for uid in ("a", "b", "c")]

    async def send(report):
        await EnvironmentGate.shared(chosen).report(report)

    await send(reports[0])
    for report in reports[1:]:
        await asyncio.to_thread(lambda report=report: asyncio.run(send(report)))
    driver = coordinator_for_driver(chosen)
    assert driver.take_reports({"a", "c"}) in ([reports[0], reports[2]], [reports[2], reports[0]])
    assert driver.take_reports({"a", "b", "c"}) == [reports[1]]


async def test_environment_is_down_for_the_driver_only_when_all_servers_are(quick_trials):
    chosen = RecipeSettings(environment_url="http://one.test:1,http://two.test:1")
    driver = coordinator_for_driver(chosen)
    down = []
    for server in chosen.servers():
        down.append(server.environment_url)
        gate = EnvironmentGate.shared(server)
        slot, _ = await gate.take_seed_slot()
        gate.note_seed(slot, failure_of(FailureKind.ENVIRONMENT_UNREACHABLE, "refused"))
        waiting = asyncio.create_task(gate.take_seed_slot())
        assert (await waiting)[1] is Pass.GO  # a trial that takes its time: the outage lasts
        counters = driver.counters()
        assert (counters.down_s > 0.0) is (len(down) == 2)
        assert counters.down_servers == tuple(down)


async def test_counts_of_all_servers_are_added_and_every_report_comes_once():
    chosen = RecipeSettings(environment_url="http://three.test:1,http://four.test:1")
    driver = coordinator_for_driver(chosen)
    for number, server in enumerate(chosen.servers()):
        gate = EnvironmentGate.shared(server)
        for _ in range(number + 1):
            slot, (seed, _) = await gate.take_open_slot(), await gate.take_seed_slot()
            gate.note_seed(seed, None)
            gate.free_open_slot(slot, closed=True)
        await gate.take_open_slot()
        await gate.report(RolloutReport(1, "a", number, 1.0, ()))
    assert driver.counters() == GateCounters(opened=3, closed=3, open_now=2, down_s=0.0)
    assert sorted(report.rollout for report in driver.take_reports({"a"})) == [0, 1]
    assert driver.take_reports({"a"}) == []


async def test_session_that_may_leave_a_server_that_is_down_does_not_wait_for_it(environment):
    chosen = settings(environment, outage_patience_s=600.0)
    gate = EnvironmentGate(chosen)
    await environment.stop()
    for asked in (True, False):  # the first finds the server gone, the second hears of it at the gate
        async with BrowserSession(chosen, gate, may_leave=True) as session:
            failure = await asyncio.wait_for(session.seed(START, SPEC), 20.0)
        assert (failure.kind, session.turned_away) == (FailureKind.ENVIRONMENT_DOWN, Pass.ELSEWHERE)
        assert bool(session.last_call) is asked


async def test_gate_is_shared_within_one_event_loop():
    assert EnvironmentGate.shared(RecipeSettings()) is EnvironmentGate.shared(RecipeSettings())


async def test_gates_of_two_event_loops_differ():
    async def shared():
        return EnvironmentGate.shared(RecipeSettings())

    mine = await shared()
    assert await asyncio.to_thread(lambda: asyncio.run(shared())) is not mine
