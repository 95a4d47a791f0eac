"""Who may pass the gate and when: the core alone, on a clock that only the test moves."""

import asyncio
from dataclasses import replace

import pytest

import gate_core
from gate_core import Ask, Ended, GateCore, GateCounters, GateLimits, Pass, ReportBook, SlotEnd, SlotKind
from rollout_stats import RolloutReport

LIMITS = GateLimits(max_open_sessions=2, max_concurrent_seeds=2, outage_after_seeds=3, outage_patience_s=100.0)
OPEN, SEED, VERIFY = SlotKind.OPEN, SlotKind.SEED, SlotKind.VERIFY
FAILED, REFUSED, SEEDED, NOTHING = SlotEnd.SEED_FAILED, SlotEnd.UNREACHABLE, SlotEnd.SEEDED, SlotEnd.NOTHING


class Gate:
    """A core, its clock, and what it answered: `answers[client, slot]`."""

    def __init__(self, **limits):
        self.now = 1000.0
        self.core = GateCore(replace(LIMITS, **limits), clock=lambda: self.now)
        self.answers = {}
        self.asked = 0
        self.join("a")

    def join(self, client, **state):
        self.core.join(client, lambda slot, answer: self.answers.update({(client, slot): answer}), **state)

    def ask(self, kind, client="a", may_leave=False):
        self.asked += 1
        self.core.handle(client, Ask(self.asked, kind, may_leave))
        return self.asked

    def end(self, slot, how=NOTHING, retry_after_s=None, client="a"):
        self.core.handle(client, Ended(slot, how, retry_after_s))

    def passed(self, *slots, client="a"):
        return [self.answers.get((client, slot)) for slot in slots]

    def wait(self, seconds):
        self.now += seconds
        self.core.tick()

    def close_gate(self):
        """Refuse one seed's connection."""
        self.end(self.ask(SEED), REFUSED)


@pytest.fixture
def full_backoff(monkeypatch):
    """Backoff without jitter: 0.5, 1, 2, 4, 8, 15 s."""
    monkeypatch.setattr(gate_core.random, "uniform", lambda low, high: high)


# Caps


async def test_open_slots_go_first_come_first_served_over_all_clients():
    gate = Gate()
    gate.join("b")
    first, second = gate.ask(OPEN), gate.ask(OPEN, "b")
    third, fourth = gate.ask(OPEN, "b"), gate.ask(OPEN)
    assert (gate.passed(first, fourth), gate.passed(second, third, client="b")) == ([Pass.GO, None], [Pass.GO, None])
    gate.end(second, client="b")
    assert (gate.passed(fourth), gate.passed(third, client="b")) == ([None], [Pass.GO])
    gate.end(first)
    assert gate.passed(fourth) == [Pass.GO]
    assert gate.core.counters().open_now == 2


async def test_seeds_and_verifies_share_their_slots_and_a_verify_goes_first():
    gate = Gate()
    seed, verify = gate.ask(SEED), gate.ask(VERIFY)
    late_seed, late_verify = gate.ask(SEED), gate.ask(VERIFY)
    assert gate.passed(seed, verify, late_seed, late_verify) == [Pass.GO, Pass.GO, None, None]
    gate.end(verify)
    assert gate.passed(late_seed, late_verify) == [None, Pass.GO]
    gate.end(seed, SEEDED)
    assert gate.passed(late_seed) == [Pass.GO]


async def test_one_who_waits_no_more_keeps_no_slot_whether_let_through_or_not():
    gate = Gate(max_open_sessions=1)
    held, given_up, next_one = gate.ask(OPEN), gate.ask(OPEN), gate.ask(OPEN)
    gate.end(given_up)
    gate.end(held)
    assert gate.passed(given_up, next_one) == [None, Pass.GO]
    gate.end(next_one)
    gate.end(next_one)
    assert gate.core.counters().open_now == 0
    assert gate.passed(gate.ask(OPEN), gate.ask(OPEN)) == [Pass.GO, None]


# Outages


async def test_refused_connection_closes_the_gate_for_seeds_alone(full_backoff):
    gate = Gate()
    gate.close_gate()
    assert gate.passed(gate.ask(SEED), gate.ask(VERIFY), gate.ask(OPEN)) == [None, Pass.GO, Pass.GO]


@pytest.mark.parametrize(
    ("ends", "down"),
    [
        ([FAILED, FAILED], False),
        ([FAILED, FAILED, FAILED], True),
        ([FAILED, FAILED, SEEDED, FAILED, FAILED], False),
        ([FAILED, FAILED, NOTHING, FAILED], True),
        ([NOTHING] * 10, False),
        ([SEEDED, REFUSED], True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
async def test_seeds_spoiled_in_a_row_close_the_gate(ends, down):
    gate = Gate()
    for how in ends:
        gate.end(gate.ask(SEED), how)
    assert gate.passed(gate.ask(SEED)) == [None if down else Pass.GO]


async def test_one_trial_at_a_time_is_let_through_with_growing_waits_and_success_opens_the_gate(full_backoff):
    gate = Gate()
    gate.close_gate()
    seeds = [gate.ask(SEED) for _ in range(12)]
    for trial, wait_s in enumerate([0.5, 1, 2, 4, 8, 15, 15]):
        gate.wait(wait_s - 0.001)
        assert gate.passed(seeds[trial]) == [None]
        gate.wait(0.001)
        assert gate.passed(*seeds[trial : trial + 2]) == [Pass.GO, None]
        gate.end(seeds[trial], FAILED)
    gate.wait(15)
    gate.wait(15)
    assert gate.passed(*seeds[7:]) == [Pass.GO, None, None, None, None]
    gate.end(seeds[7], SEEDED)
    assert gate.passed(*seeds[8:]) == [Pass.GO, Pass.GO, None, None]
    assert gate.core.counters().down_s == 0.0


async def test_a_trial_is_let_through_by_the_clock_alone(monkeypatch):
    # The one test on the real clock: nobody calls the core between the question and the answer.
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 0.01)
    core, answered = GateCore(LIMITS), asyncio.get_running_loop().create_future()
    core.join("a", lambda slot, answer: None if answered.done() else answered.set_result((slot, answer)))
    core.handle("a", Ended(1, REFUSED))
    core.handle("a", Ask(2, SEED))
    assert await asyncio.wait_for(answered, 20.0) == (2, Pass.GO)


async def test_trial_that_comes_to_no_end_makes_room_for_the_next_one(full_backoff):
    gate = Gate()
    gate.close_gate()
    given_up, next_one = gate.ask(SEED), gate.ask(SEED)
    gate.wait(0.5)
    gate.end(given_up)
    assert gate.passed(next_one) == [Pass.GO]


async def test_seed_from_before_the_outage_is_no_trial_but_its_success_opens_the_gate(full_backoff):
    gate = Gate(max_concurrent_seeds=4)
    one, two, three = (gate.ask(SEED) for _ in range(3))
    gate.end(one, REFUSED)
    gate.end(two, REFUSED)
    waiting = gate.ask(SEED)
    gate.wait(0.5)
    assert gate.passed(waiting) == [Pass.GO], "a failure that was no trial lengthened the backoff"
    gate.end(three, SEEDED)
    assert gate.passed(gate.ask(SEED)) == [Pass.GO]


@pytest.mark.parametrize(("retry_after_s", "wait_s"), [(None, 0.5), (0.1, 0.5), (7.0, 7.0), (3600.0, 60.0)], ids=str)
async def test_retry_after_delays_the_next_trial_up_to_a_minute(full_backoff, retry_after_s, wait_s):
    gate = Gate(outage_after_seeds=1)
    gate.end(gate.ask(SEED), FAILED, retry_after_s)
    trial = gate.ask(SEED)
    gate.wait(wait_s - 0.001)
    assert gate.passed(trial) == [None]
    gate.wait(0.001)
    assert gate.passed(trial) == [Pass.GO]


async def test_retry_after_of_a_failed_trial_counts_too(full_backoff):
    gate = Gate()
    gate.close_gate()
    trial, waiting = gate.ask(SEED), gate.ask(SEED)
    gate.wait(0.5)
    gate.end(trial, FAILED, 30.0)
    gate.wait(29.9)
    assert gate.passed(waiting) == [None]
    gate.wait(0.1)
    assert gate.passed(waiting) == [Pass.GO]


# Other servers


async def test_server_counts_as_down_from_the_moment_that_closes_its_gate():
    gate = Gate(server="http://a:1")
    assert gate.core.counters().down_servers == ()
    gate.close_gate()
    assert (gate.core.counters().down_s, gate.core.counters().down_servers) == (0.0, ("http://a:1",))


async def test_seed_that_may_leave_waits_for_no_outage_but_is_its_trial_like_any(full_backoff):
    gate = Gate()
    leaving = [gate.ask(SEED, may_leave=True) for _ in range(3)]
    assert gate.passed(*leaving) == [Pass.GO, Pass.GO, None], "there is no outage yet"
    gate.end(leaving[0], REFUSED)
    staying, late = gate.ask(SEED), gate.ask(SEED, may_leave=True)
    assert gate.passed(leaving[2], late, staying) == [Pass.ELSEWHERE, Pass.ELSEWHERE, None]
    gate.end(staying)
    gate.wait(0.5)
    trial, next_one = gate.ask(SEED, may_leave=True), gate.ask(SEED, may_leave=True)
    assert gate.passed(trial, next_one) == [Pass.GO, Pass.ELSEWHERE]
    gate.end(trial, SEEDED)
    assert gate.passed(gate.ask(SEED, may_leave=True)) == [Pass.GO]


async def test_one_sent_elsewhere_holds_no_slot():
    gate = Gate(max_concurrent_seeds=1)
    gate.close_gate()
    assert gate.passed(gate.ask(SEED, may_leave=True), gate.ask(VERIFY)) == [Pass.ELSEWHERE, Pass.GO]


async def test_seeds_that_leave_use_up_patience_and_are_then_refused_or_the_last_trial(full_backoff):
    gate = Gate(outage_patience_s=50.0)
    gate.close_gate()
    for _ in range(4):
        gate.wait(10)
        gate.end(gate.ask(SEED, may_leave=True), REFUSED)
    gate.wait(10)
    last = gate.ask(SEED, may_leave=True)
    assert gate.passed(last) == [Pass.LAST_CHANCE]
    assert gate.core.counters().down_s == 50.0
    gate.wait(150)
    gate.end(last, FAILED)
    assert gate.passed(gate.ask(SEED, may_leave=True)) == [Pass.REFUSED]


# Patience


def spent_gate():
    """Return a gate whose outage has just outlasted its patience while one seed waited."""
    gate = Gate(outage_patience_s=50.0)
    gate.close_gate()
    trial, waiting = gate.ask(SEED), gate.ask(SEED)
    gate.wait(15)
    gate.wait(35)
    assert gate.passed(trial, waiting) == [Pass.GO, Pass.REFUSED]
    gate.end(trial, REFUSED)
    gate.wait(35)  # as long as the trial took, see below
    return gate


async def test_patience_counts_from_the_first_failure(full_backoff):
    gate = Gate()
    gate.close_gate()
    seeds = [gate.ask(SEED) for _ in range(8)]
    for trial, wait_s in enumerate([0.5, 1, 2, 4, 8, 15]):
        gate.wait(wait_s)
        gate.end(seeds[trial], FAILED)
    gate.wait(100 - 30.5 - 0.1)
    assert gate.passed(*seeds[6:]) == [Pass.GO, None]
    assert gate.core.counters().down_s == pytest.approx(99.9)
    gate.wait(0.1)
    assert gate.passed(seeds[7]) == [Pass.REFUSED]


async def test_beyond_patience_each_seed_is_a_trial_at_once_and_the_last_one():
    gate = spent_gate()
    for _ in range(3):
        late = gate.ask(SEED)
        assert gate.passed(late) == [Pass.LAST_CHANCE]
        gate.end(late, REFUSED)
    recovered = gate.ask(SEED)
    gate.end(recovered, SEEDED)
    assert gate.passed(recovered, gate.ask(SEED)) == [Pass.LAST_CHANCE, Pass.GO]


async def test_beyond_patience_a_failed_trial_answers_for_all_that_wait():
    gate = spent_gate()
    seeds = [gate.ask(SEED) for _ in range(4)]
    assert gate.passed(*seeds) == [Pass.LAST_CHANCE, Pass.LAST_CHANCE, None, None]
    gate.end(seeds[0], FAILED)
    assert gate.passed(*seeds[2:]) == [Pass.REFUSED, Pass.REFUSED]


async def test_beyond_patience_a_trial_that_took_long_is_not_repeated_for_as_long():
    gate = spent_gate()
    slow = gate.ask(SEED)
    gate.wait(150)
    gate.end(slow, FAILED)
    for wait_s in (0, 75, 74):
        gate.wait(wait_s)
        assert gate.passed(gate.ask(SEED)) == [Pass.REFUSED]
    gate.wait(1)
    assert gate.passed(gate.ask(SEED)) == [Pass.LAST_CHANCE]


async def test_a_long_silence_does_not_use_up_patience(full_backoff):
    gate = Gate()
    gate.close_gate()
    gate.wait(1)
    gate.end(gate.ask(SEED), FAILED)
    assert gate.core.counters().down_s == 1.0
    gate.wait(3600)
    assert gate.core.counters().down_s == 1.0
    trial, waiting = gate.ask(SEED), gate.ask(SEED)
    assert gate.passed(trial, waiting) == [Pass.GO, None]
    gate.wait(99)
    assert gate.core.counters().down_s == 99.0
    gate.wait(1)
    assert gate.passed(waiting) == [Pass.REFUSED]


async def test_waiting_seeds_are_no_silence():
    gate = Gate(outage_patience_s=10_000.0)
    gate.close_gate()
    hung, waiting = gate.ask(SEED), gate.ask(SEED)
    gate.wait(15)
    gate.wait(3600)
    late = gate.ask(SEED)
    assert gate.passed(hung, waiting, late) == [Pass.GO, None, None], "the outage was taken for a new one"
    assert gate.core.counters().down_s == 3615.0


# Clients


async def test_client_that_is_dropped_gives_back_all_that_it_holds_and_waits_for(full_backoff):
    gate = Gate()
    gate.join("b")
    gate.close_gate()
    for kind in (OPEN, OPEN, OPEN, VERIFY, SEED, SEED):
        gate.ask(kind, "b")
    gate.wait(0.5)
    mine = [gate.ask(OPEN), gate.ask(SEED)]
    assert gate.core.drop("b") == 4
    assert gate.passed(*mine) == [Pass.GO, Pass.GO]
    assert gate.core.counters().open_now == 1


async def test_client_under_a_new_name_keeps_what_it_holds_its_trial_and_its_place_under_the_cap(full_backoff):
    gate = Gate()
    gate.join("b")
    opened = [gate.ask(OPEN), gate.ask(OPEN)]
    gate.close_gate()
    trial, waiting = gate.ask(SEED), gate.ask(SEED, "b")
    gate.wait(0.5)
    held = [*(Ask(slot, OPEN) for slot in opened), Ask(trial, SEED)]
    gate.join("c", held=held, waiting=[Ask(900, OPEN)], replaces="a")
    assert gate.core.counters().open_now == 2
    assert (gate.passed(900, client="c"), gate.passed(waiting, client="b")) == ([None], [None])
    gate.end(opened[0], SlotEnd.CLOSED, client="c")
    gate.end(trial, SEEDED, client="c")
    assert (gate.passed(900, client="c"), gate.passed(waiting, client="b")) == ([Pass.GO], [Pass.GO])


async def test_gate_that_is_held_back_lets_nobody_through_until_then():
    gate = Gate()
    gate.core.hold_back(5.0)
    waiting = [gate.ask(kind) for kind in SlotKind]
    gate.wait(4.9)
    assert gate.passed(*waiting) == [None] * 3
    gate.wait(0.1)
    assert gate.passed(*waiting) == [Pass.GO] * 3


async def test_sessions_are_counted_as_their_seeds_and_closes_are_answered():
    gate = Gate()
    slot, seed = gate.ask(OPEN), gate.ask(SEED)
    assert gate.core.counters() == GateCounters(opened=0, closed=0, open_now=1, down_s=0.0)
    gate.end(seed, SEEDED)
    assert gate.core.counters() == GateCounters(opened=1, closed=0, open_now=1, down_s=0.0)
    gate.end(slot, SlotEnd.CLOSED)
    assert gate.core.counters() == GateCounters(opened=1, closed=1, open_now=0, down_s=0.0)


def test_backoff_doubles_up_to_a_cap_with_jitter():
    for attempt, longest in enumerate([0.5, 1, 2, 4, 8, 15, 15, 15]):
        waits = [gate_core.backoff_s(attempt) for _ in range(50)]
        assert longest / 2 <= min(waits) <= max(waits) <= longest
        assert len(set(waits)) > 1
    assert gate_core.backoff_s(10_000) <= 15


# Reports


def report(uid, rollout=0, reward=1.0):
    return RolloutReport(global_step=1, uid=uid, rollout=rollout, reward=reward, attempts=())


def test_reports_are_taken_once_and_only_those_of_the_groups_asked_for():
    book = ReportBook()
    for uid in "abc":
        for rollout in range(2):
            book.add(report(uid, rollout))
    assert book.take({"b", "unknown"}) == [report("b", 0), report("b", 1)]
    assert book.take({"b"}) == []
    assert len(book.take({"a", "c"})) == 4


def test_report_that_comes_twice_counts_once():
    book = ReportBook(most=2)
    for _ in range(5):
        book.add(report("a"))
    book.add(report("b"))
    assert book.take({"a", "b"}) in ([report("a"), report("b")], [report("b"), report("a")])


def test_reports_that_nobody_takes_are_bounded_and_the_oldest_are_dropped():
    book = ReportBook(most=4)
    for number in range(100):
        book.add(report(f"u{number}", 0))
        book.add(report(f"u{number}", 1))
    kept = book.take({f"u{number}" for number in range(100)})
    assert sorted({r.uid for r in kept}) == ["u98", "u99"]
    assert len(kept) == 4
