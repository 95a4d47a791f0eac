"""One gate over several Ray workers; the same protocol with calls that go wrong on purpose; a coordinator that dies."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import ray

import environment_coordinator
import gate_core
from environment_coordinator import Coordinator, RayLink, coordinator_for_driver, find_or_start
from environment_gate import CoordinatorError, EnvironmentGate, GateCounters, Pass
from gate_core import GateLimits
from recipe_settings import RecipeSettings, SettingsError
from rollout_failures import FailureKind, failure_of
from rollout_stats import RolloutReport
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.gate_worker import GateWorker
from tests.sessions import SEED_PATH, SITE, VERIFY_PATH, settings

ROOT = Path(__file__).resolve().parents[2]
# Importing Ray's workers and starting actors takes seconds each on a busy machine with 2 cores.
pytestmark = pytest.mark.timeout(180)


# Without Ray's processes: the actor's class in this event loop, behind calls that a test can break


class Method:
    """`actor.method`: `.remote(...)` returns what can be awaited."""

    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *arguments):
        call = asyncio.ensure_future(self.actor.call(self.name, *arguments))  # Ray sends a call without being awaited
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call


class ActorHere:
    """The coordinator without Ray. `lose` names calls whose answer is lost once, `drop` those that get nowhere once."""

    def __init__(self, chosen, silent_after_s=60.0, poll_s=10.0, settle_s=0.0):
        self.coordinator = Coordinator(GateLimits.of(chosen), silent_after_s, poll_s, settle_s)
        self.lose = []
        self.drop = []
        self.calls = []
        self.dead = False

    def __getattr__(self, name):
        return Method(self, name)

    async def call(self, name, *arguments):
        self.calls.append(name)
        if self.dead:
            raise ray.exceptions.ActorDiedError()
        if name in self.drop:
            self.drop.remove(name)
            raise ray.exceptions.ActorUnavailableError("dropped", None)
        answer = await getattr(self.coordinator, name)(*arguments)
        if name in self.lose and answer != []:
            self.lose.remove(name)
            raise ray.exceptions.ActorUnavailableError("lost", None)
        return answer


@pytest.fixture
def actor_here(monkeypatch):
    """Return a function that puts a coordinator in the place of Ray's."""
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 0.01)

    def place(chosen, **options):
        actor = ActorHere(chosen, **options)
        monkeypatch.setattr(environment_coordinator, "find_or_start", lambda settings: actor)
        return actor

    return place


def gate_over(chosen):
    return EnvironmentGate(chosen, RayLink(chosen))


async def waits(*tasks, for_s=0.1):
    """Whether all tasks are still under way after whatever could finish one has had its turn."""
    return not (await asyncio.wait(tasks, timeout=for_s))[0]


@pytest.mark.parametrize("lost", ["join", "push", "pull"])
async def test_answer_that_is_lost_on_its_way_costs_no_slot_and_gives_none_away(actor_here, lost):
    chosen = RecipeSettings(max_open_sessions=2)
    actor = actor_here(chosen)
    one, two = gate_over(chosen), gate_over(chosen)
    if lost != "join":
        first = await one.take_open_slot()
    actor.lose.append(lost)
    slot = await asyncio.wait_for(one.take_open_slot(), 20.0)
    if lost == "join":
        first = await one.take_open_slot()
    assert actor.lose == []
    late = asyncio.create_task(two.take_open_slot())
    assert await waits(late)
    actor.lose.append("push")
    one.free_open_slot(slot, closed=False)
    one.free_open_slot(first, closed=False)
    two.free_open_slot(await asyncio.wait_for(late, 20.0), closed=False)
    assert (await one.drain(20.0), await two.drain(20.0)) == (0, 0)
    assert actor.lose == []
    assert (await actor.coordinator.counters()).open_now == 0


@pytest.mark.parametrize("broken", ["drop", "lose"])
async def test_report_is_delivered_once_whatever_becomes_of_the_call(actor_here, broken):
    chosen = RecipeSettings()
    actor = actor_here(chosen)
    getattr(actor, broken).append("push")
    report = RolloutReport(1, "u", 0, 1.0, ())
    await asyncio.wait_for(gate_over(chosen).report(report), 20.0)
    assert getattr(actor, broken) == []
    assert await actor.coordinator.take_reports({"u"}) == [report]


async def test_waiter_that_is_cancelled_keeps_no_slot_behind_the_actor(actor_here):
    chosen = RecipeSettings(max_open_sessions=1)
    actor_here(chosen)
    one, two = gate_over(chosen), gate_over(chosen)
    held = await one.take_open_slot()
    given_up = asyncio.create_task(two.take_open_slot())
    assert await waits(given_up)
    one.free_open_slot(held, closed=False)
    await one.drain(20.0)  # the slot is given to `two`, whose link has not fetched it yet
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await asyncio.wait_for(one.take_open_slot(), 20.0)


@pytest.mark.parametrize("lost", ["push", "join", "pull"])
async def test_one_who_may_leave_is_sent_elsewhere_whatever_call_is_lost_and_holds_no_slot(actor_here, lost):
    chosen = RecipeSettings(max_concurrent_seeds=1)
    actor = actor_here(chosen)
    gate = gate_over(chosen)
    if lost != "join":
        slot, _ = await gate.take_seed_slot()
    else:
        actor.lose.append(lost)
        slot, _ = await asyncio.wait_for(gate.take_seed_slot(), 20.0)
    waiting = asyncio.create_task(gate.take_seed_slot(may_leave=True))
    assert await waits(waiting)
    if lost != "join":
        actor.lose.append(lost)
    refused = failure_of(FailureKind.ENVIRONMENT_UNREACHABLE, "refused")
    gate.note_seed(slot, replace(refused, retry_after_s=60.0))  # no trial is due in this test
    assert (await asyncio.wait_for(waiting, 20.0))[1] is Pass.ELSEWHERE
    assert actor.lose == []
    actor.lose.append("push")  # a link that joins anew says what it holds
    gate.free_verify_slot(await asyncio.wait_for(gate.take_verify_slot(), 20.0))


async def test_no_call_is_made_while_sessions_are_just_open(actor_here):
    chosen = RecipeSettings()
    actor = actor_here(chosen)
    gate = gate_over(chosen)
    await asyncio.gather(*(gate.take_open_slot() for _ in range(16)))
    calls = len(actor.calls)
    await waits(asyncio.ensure_future(asyncio.Event().wait()))
    assert len(actor.calls) - calls <= 1, actor.calls
    assert calls <= 10, "one call per slot"


async def test_worker_that_was_taken_for_dead_joins_again_with_what_it_holds(actor_here):
    chosen = RecipeSettings(max_open_sessions=1)
    actor = actor_here(chosen, silent_after_s=0.05, poll_s=10.0)
    stuck, other = gate_over(chosen), gate_over(chosen)
    slot = await stuck.take_open_slot()
    late = asyncio.create_task(other.take_open_slot())
    # The holder's one call waits for news, longer than a worker may be silent here: it loses its slot to the other.
    async with asyncio.timeout(20.0):
        while not late.done():
            await asyncio.wait({late}, timeout=0.02)
            await actor.coordinator.counters()
    assert (await actor.coordinator.counters()).open_now <= 2
    actor.coordinator._silent_after_s = 60.0
    stuck.free_open_slot(slot, closed=False)
    other.free_open_slot(late.result(), closed=False)
    await asyncio.gather(stuck.drain(20.0), other.drain(20.0))
    assert await asyncio.wait_for(stuck.take_open_slot(), 20.0)


async def test_new_coordinator_learns_what_every_worker_holds_before_it_lets_a_newcomer_through(actor_here):
    chosen = RecipeSettings(max_open_sessions=1)
    first = actor_here(chosen, poll_s=0.05)
    one, two, newcomer = gate_over(chosen), gate_over(chosen), gate_over(chosen)
    held = await one.take_open_slot()
    late = {asyncio.create_task(two.take_open_slot())}
    assert await waits(*late)
    second = actor_here(chosen, settle_s=0.2)
    late.add(asyncio.create_task(newcomer.take_open_slot()))
    async with asyncio.timeout(20.0):
        while "join" not in second.calls:
            await asyncio.sleep(0)
        first.dead = True
        while (await second.coordinator.counters()).open_now == 0:
            await asyncio.sleep(0)
    assert await waits(*late, for_s=0.4), "the cap does not hold over the new coordinator"
    one.free_open_slot(held, closed=True)
    done, _ = await asyncio.wait(late, timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    assert await second.coordinator.counters() == GateCounters(0, 1, 1, 0.0)
    for task in late - done:
        task.cancel()


async def test_nothing_waits_for_ever_on_a_coordinator_that_is_gone(actor_here, monkeypatch, caplog):
    monkeypatch.setattr(environment_coordinator, "GIVE_UP_AFTER_S", 0.1)
    chosen = RecipeSettings()
    actor = actor_here(chosen)
    gate = gate_over(chosen)
    held = await gate.take_open_slot()
    actor.dead = True
    with pytest.raises(CoordinatorError, match="No answer from the environment gate's coordinator for 0.1 s"):
        await asyncio.wait_for(gate.take_open_slot(), 20.0)
    await asyncio.wait_for(gate.report(RolloutReport(1, "u", 7, None, ())), 20.0)
    assert "report of rollout u_7 is lost" in caplog.text
    back = actor_here(chosen)
    await asyncio.wait_for(gate.take_open_slot(), 20.0)
    assert (await back.coordinator.counters()).open_now == 2
    gate.free_open_slot(held, closed=False)


async def test_nothing_waits_for_ever_on_a_coordinator_that_does_not_answer(actor_here, monkeypatch):
    monkeypatch.setattr(environment_coordinator, "GIVE_UP_AFTER_S", 0.1)
    monkeypatch.setattr(environment_coordinator, "CALL_TIMEOUT_S", 0.05)
    chosen = RecipeSettings()
    actor = actor_here(chosen)

    async def for_ever(*arguments):
        await asyncio.Event().wait()

    actor.coordinator.join = for_ever
    with pytest.raises(CoordinatorError):
        await asyncio.wait_for(gate_over(chosen).take_open_slot(), 20.0)


async def test_bug_in_the_coordinator_fails_those_who_wait(actor_here, monkeypatch):
    actor = actor_here(RecipeSettings())

    async def broken(*arguments):
        raise KeyError("bug")

    actor.coordinator.join = broken
    with pytest.raises(CoordinatorError, match="bug"):
        await asyncio.wait_for(gate_over(RecipeSettings()).take_open_slot(), 20.0)


async def test_workers_with_other_caps_are_refused_by_name(actor_here):
    actor_here(RecipeSettings(max_open_sessions=4))
    with pytest.raises(SettingsError, match="(?s)max_open_sessions=4.*max_open_sessions=5.*export the same settings"):
        await asyncio.wait_for(gate_over(RecipeSettings(max_open_sessions=5)).take_open_slot(), 20.0)


def test_driver_that_gets_no_answer_says_so(monkeypatch):
    monkeypatch.setattr(environment_coordinator, "ray_runs", lambda: True)
    monkeypatch.setattr(environment_coordinator, "DRIVER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 0.01)

    class Dead:
        def __getattr__(self, name):
            raise ray.exceptions.ActorDiedError()

    monkeypatch.setattr(environment_coordinator, "find_or_start", lambda settings: Dead())
    with pytest.raises(CoordinatorError, match="`counters` within 0.05 s"):
        coordinator_for_driver(RecipeSettings()).counters()


def test_no_cluster_is_started_behind_the_users_back():
    assert not ray.is_initialized()
    with pytest.raises(CoordinatorError, match="does not run"):
        find_or_start(RecipeSettings())


# With Ray


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def workers(cluster):
    """Four processes."""
    return [ray.remote(GateWorker).options(num_cpus=0).remote() for _ in range(4)]


async def finished(call, timeout_s=60.0):
    return await asyncio.wait_for(call, timeout_s)


async def test_caps_hold_over_all_workers_and_their_reports_reach_the_driver(workers):
    async with FakeEnvironment(SITE) as environment:
        chosen = settings(environment, max_open_sessions=3, max_concurrent_seeds=2)
        find_or_start(chosen, settle_s=0.0)
        environment.faults += [Fault(Do.HANG, path=SEED_PATH), Fault(Do.HANG, path=VERIFY_PATH)]
        rollouts = asyncio.gather(*(worker.play.remote(chosen, f"u{i}", 6) for i, worker in enumerate(workers[:3])))
        await environment.until(lambda seen: len(seen.calls) == 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.until(lambda seen: len(seen.calls) > 2), timeout=0.5)
        environment.release()
        assert await rollouts == [[0.0] * 6] * 3
        driver = coordinator_for_driver(chosen)
        assert driver.counters() == GateCounters(opened=18, closed=18, open_now=0, down_s=0.0)
    assert (environment.seen.peak_open, environment.seen.peak_opening) == (3, 2)
    assert sorted(report.rollout for report in driver.take_reports({"u0", "u2"})) == sorted([*range(6)] * 2)
    assert {report.uid for report in driver.take_reports({"u0", "u1", "u2"})} == {"u1"}


async def test_caps_hold_over_all_workers_and_each_of_two_servers_has_its_share(workers):
    async with FakeEnvironment(SITE) as one, FakeEnvironment(SITE) as two:
        chosen = settings(one, environment_url=f"{one.url},{two.url}", max_open_sessions=5, max_concurrent_seeds=3)
        for server in chosen.servers():
            find_or_start(server, settle_s=0.0)
        for environment in (one, two):
            environment.faults += [Fault(Do.HANG, path=SEED_PATH), Fault(Do.HANG, path=VERIFY_PATH)]
        rollouts = asyncio.gather(*(worker.play.remote(chosen, f"v{i}", 8) for i, worker in enumerate(workers[:3])))
        await one.until(lambda seen: len(seen.calls) == 2)
        await two.until(lambda seen: len(seen.calls) == 1)
        with pytest.raises(TimeoutError):
            more = [asyncio.ensure_future(one.until(lambda seen: len(seen.calls) > 2))]
            more.append(asyncio.ensure_future(two.until(lambda seen: len(seen.calls) > 1)))
            await asyncio.wait_for(asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED), timeout=0.5)
        for task in more:
            task.cancel()
        one.release()
        two.release()
        assert await rollouts == [[0.0] * 8] * 3
        driver = coordinator_for_driver(chosen)
        assert driver.counters() == GateCounters(opened=24, closed=24, open_now=0, down_s=0.0)
        assert [coordinator_for_driver(server).counters().opened for server in chosen.servers()] == [12, 12]
    assert [(seen.peak_open, seen.peak_opening) for seen in (one.seen, two.seen)] == [(3, 2), (2, 1)]
    reports = driver.take_reports({"v0", "v1", "v2"})
    assert Counter(report.uid for report in reports) == {"v0": 8, "v1": 8, "v2": 8}
    assert driver.take_reports({"v0", "v1", "v2"}) == []


async def test_thousands_who_wait_do_not_keep_a_slot_from_being_given_back(workers):
    chosen = RecipeSettings(environment_url="http://crowd.test:1", max_open_sessions=1)
    # A call that waits gives way too late for this test.
    find_or_start(chosen, silent_after_s=600.0, poll_s=35.0, settle_s=0.0)
    holder, crowd, *_ = workers
    await finished(holder.take.remote(chosen))
    # More calls that wait than a Ray actor runs at once by default, which is 1000.
    await finished(crowd.crowd.remote(chosen, 1100, 3), 30.0)
    await finished(holder.free.remote(), 30.0)
    assert await finished(crowd.disperse.remote(), 120.0) <= 1
    await finished(holder.take.remote(chosen))
    assert coordinator_for_driver(chosen).counters().open_now == 1
    await finished(holder.free.remote())


async def test_coordinator_that_is_killed_is_started_anew_and_knows_what_is_held(workers):
    chosen = RecipeSettings(environment_url="http://restart.test:1", max_open_sessions=1)
    holder, other, *_ = workers
    await finished(holder.take.remote(chosen))
    late = asyncio.ensure_future(finished(other.take.remote(chosen), 120.0))
    ray.kill(find_or_start(chosen))
    driver = coordinator_for_driver(chosen)
    async with asyncio.timeout(60.0):
        while (await asyncio.to_thread(driver.counters)).open_now == 0:
            await asyncio.sleep(0)
    assert await waits(late, for_s=environment_coordinator.SETTLE_S + 0.5), "the cap does not hold over the new one"
    await finished(holder.free.remote())
    await late
    await finished(other.free.remote())


async def test_slots_of_a_killed_worker_come_back_and_those_of_a_living_one_do_not(workers):
    chosen = RecipeSettings(environment_url="http://killed.test:1", max_open_sessions=2)
    find_or_start(chosen, silent_after_s=3.0, poll_s=0.3, settle_s=0.0)
    living, other, _, killed = workers
    await finished(living.take.remote(chosen))
    await finished(killed.take.remote(chosen))
    ray.kill(killed)
    await finished(other.take.remote(chosen))
    one_more = asyncio.ensure_future(finished(other.take.remote(chosen), 120.0))
    assert (await asyncio.wait({one_more}, timeout=4.0))[0] == set(), "a worker that lives lost its slot"
    await finished(living.free.remote())
    await one_more
