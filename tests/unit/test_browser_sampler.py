"""What the trainer gets from the sampler when rollouts are invalid: a batch, another draw, or one clear error."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import browser_sampler
import patches
from browser_sampler import BrowserReplayBuffer, BrowserReplayBufferAsync, EnvironmentHalt, WorkerDied
from rollout_failures import TRAITS, FailureKind
from rollout_stats import AttemptReport, RolloutReport

DOWN_AFTER_S = 600.0


class Queue:
    """Stands in for TransferQueue's key-value calls: tags and extra_fields by partition and key."""

    def __init__(self):
        self.tags = {"train": {}, "val": {}}
        self.fields = {}

    def add_group(self, partition, uid, rows, status="finished"):
        """Add one prompt and its rows; each row is whether it is flagged."""
        self.tags[partition][uid] = {"is_prompt": True, "status": status, "global_steps": 1}
        for rollout, flagged in rows.items():
            key = f"{uid}_{rollout}_0"
            self.tags[partition][key] = {"status": "success"}
            self.fields[key] = {"env_invalid": flagged}

    def kv_list(self):
        return {partition: dict(tags) for partition, tags in self.tags.items()}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.tags[partition_id].pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        return {"extra_fields": np.array([self.fields[key] for key in keys] + [None], dtype=object)[:-1]}


class Coordinator:
    """Stands in for the gate's driver side."""

    def __init__(self):
        self.reports = []
        self.asked = 0
        self.now = SimpleNamespace(opened=0, closed=0, open_now=0, down_s=0.0, down_servers=())

    def take_reports(self, uids):
        taken = [report for report in self.reports if report.uid in uids]
        self.reports = [report for report in self.reports if report.uid not in uids]
        return taken

    def counters(self):
        self.asked += 1
        return self.now


class World:
    """A sampler over a queue, and prompts that come back with the outcomes that a test lists."""

    def __init__(self, queue, coordinator):
        self.queue, self.coordinator = queue, coordinator
        self.refills = []
        self.outcomes = []

    def play(self, partition, uid, *outcomes, keep_flagged=False):
        """Let a group end: each outcome is a reward, or the kind of failure of an invalid rollout."""
        rows = {}
        for rollout, outcome in enumerate(outcomes):
            invalid = isinstance(outcome, FailureKind)
            fault = str(TRAITS[outcome].fault) if invalid else ""
            attempt = AttemptReport(str(outcome) if invalid else "", fault, "seed", 1)
            reward = None if invalid else outcome
            self.coordinator.reports.append(RolloutReport(1, uid, rollout, reward, (attempt,)))
            if not invalid or keep_flagged:
                rows[rollout] = invalid
        self.queue.add_group(partition, uid, rows)

    def refill(self, count):
        """Stands in for verl's dispatch of fresh prompts, which here end at once."""
        self.refills.append(count)
        if not self.outcomes:
            raise AssertionError("no more prompts in this test")
        self.play("train", f"fresh{len(self.refills)}", *self.outcomes.pop(0))


@pytest.fixture
def world(monkeypatch):
    world = World(Queue(), Coordinator())
    monkeypatch.setenv("NEMO_GYM_URL", "http://gym:8000")
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", world.queue)
    monkeypatch.setattr(browser_sampler, "tq", world.queue)
    monkeypatch.setattr(browser_sampler, "coordinator_for_driver", lambda settings: world.coordinator)
    monkeypatch.setattr(patches, "require_applied", lambda: None)
    return world


def sampler(world, cls=BrowserReplayBuffer, **sampler_kwargs):
    return cls(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=sampler_kwargs,
        poll_interval=0.0,
        refill_fn=world.refill,
    )


def draw(buffer, step=1, partition="train", groups=1):
    return buffer.sample(global_steps=step, partition_id=partition, batch_size=groups)


BOTH = pytest.mark.parametrize("cls", [BrowserReplayBuffer, BrowserReplayBufferAsync])
SEED_TIMEOUT = FailureKind.SEED_TIMEOUT


@BOTH
def test_valid_rollouts_make_a_batch_and_the_invalid_ones_are_counted(world, cls):
    world.play("train", "a", 1.0, 0.0, SEED_TIMEOUT)
    batch, metrics = draw(sampler(world, cls))
    assert sorted(batch.keys) == ["a_0_0", "a_1_0"]
    assert metrics["browser/rollouts_valid"] == 2.0
    assert metrics["browser/invalid_share/seed_timeout"] == pytest.approx(1 / 3)
    assert metrics["browser/reward_over_valid/mean"] == 0.5


@BOTH
@pytest.mark.parametrize("keep_flagged", [False, True], ids=["dropped", "flagged"])
def test_a_step_without_a_valid_rollout_is_drawn_again_and_leaves_nothing_behind(world, cls, keep_flagged):
    world.play("train", "a", SEED_TIMEOUT, SEED_TIMEOUT, keep_flagged=keep_flagged)
    world.outcomes = [[1.0, 0.0]]
    batch, metrics = draw(sampler(world, cls))
    assert world.refills == [1]
    assert sorted(batch.keys) == ["fresh1_0_0", "fresh1_1_0"]
    assert metrics["browser/rollouts"] == 4.0
    assert not any(key.startswith("a") for key in world.queue.tags["train"])


def test_a_whole_group_may_be_invalid_as_long_as_another_is_not(world):
    world.play("train", "a", SEED_TIMEOUT, SEED_TIMEOUT)
    world.play("train", "b", 1.0, 0.0)
    batch, _ = draw(sampler(world), groups=2)
    assert sorted(batch.keys) == ["b_0_0", "b_1_0"]
    assert world.refills == []


def test_one_survivor_is_a_batch(world):
    world.play("train", "a", SEED_TIMEOUT, 1.0)
    batch, _ = draw(sampler(world))
    assert batch.keys == ["a_1_0"]


def test_draws_without_a_valid_rollout_end_with_the_clear_error(world):
    world.play("train", "a", SEED_TIMEOUT)
    world.outcomes = [[SEED_TIMEOUT], [SEED_TIMEOUT], [1.0]]
    with pytest.raises(EnvironmentHalt) as halt:
        draw(sampler(world, halt_after_steps=3))
    assert world.refills == [1, 1]
    for part in (
        "3. in a row",
        "1 of 1 rollouts invalid (seed_timeout 1)",
        "smoke_environment.py --url http://gym:8000",
    ):
        assert part in str(halt.value)


@pytest.mark.parametrize(
    ("kinds", "judge", "environment"),
    [
        ((SEED_TIMEOUT,), False, True),
        ((FailureKind.JUDGE_UNREACHABLE,), True, False),
        ((FailureKind.JUDGE_UNREACHABLE, SEED_TIMEOUT), True, True),
    ],
)
def test_what_to_check_is_what_failed(world, kinds, judge, environment):
    world.play("train", "a", *kinds)
    with pytest.raises(EnvironmentHalt) as halt:
        draw(sampler(world, halt_after_steps=1))
    assert ("python judge.py --check" in str(halt.value)) is judge
    assert ("smoke_environment.py --url http://gym:8000" in str(halt.value)) is environment


def bad_step(world, buffer, step):
    world.play("train", f"bad{step}", 1.0, SEED_TIMEOUT, SEED_TIMEOUT)
    return draw(buffer, step)


def test_bad_steps_in_a_row_halt_the_run_and_a_good_one_between_them_does_not(world):
    buffer = sampler(world, max_invalid_share=0.5, halt_after_steps=2)
    bad_step(world, buffer, 1)
    world.play("train", "good", 1.0, SEED_TIMEOUT)
    draw(buffer, 2)
    bad_step(world, buffer, 3)
    with pytest.raises(EnvironmentHalt, match=r"Step 4 is the 2\. in a row above 50%: 2 of 3 rollouts invalid"):
        bad_step(world, buffer, 4)


def test_a_bad_step_is_reported_at_once(world, caplog):
    bad_step(world, sampler(world), 1)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Step 1: 2 of 3 rollouts invalid (seed_timeout 2), more than 50%" in record.getMessage()


@pytest.mark.parametrize("down_s", [0.0, DOWN_AFTER_S + 1], ids=["every rollout gave up", "gate closed too long"])
def test_an_environment_that_stays_down_halts_the_run_at_once(world, down_s):
    world.coordinator.now.down_s = down_s
    outcome = SEED_TIMEOUT if down_s else FailureKind.ENVIRONMENT_DOWN
    world.play("train", "a", outcome, *([1.0] if down_s else []))
    with pytest.raises(EnvironmentHalt, match="The environment is down at step 1"):
        draw(sampler(world))
    assert world.refills == []


SERVERS = "http://a:1,http://b:1"


@pytest.mark.parametrize(
    ("down", "named"),
    [((), ["http://a:1", "http://b:1"]), (("http://b:1",), ["http://b:1"])],
    ids=["none is known to be down", "one is down"],
)
def test_what_to_check_are_the_servers_that_are_down_or_all(world, monkeypatch, down, named):
    monkeypatch.setenv("NEMO_GYM_URL", SERVERS)
    world.coordinator.now.down_servers = down
    world.play("train", "a", SEED_TIMEOUT)
    with pytest.raises(EnvironmentHalt) as halt:
        draw(sampler(world, halt_after_steps=1))
    assert re.findall(r"smoke_environment.py --url (\S+)`", str(halt.value)) == named


def test_one_server_that_is_down_is_named_and_counted_and_training_goes_on(world, monkeypatch, caplog):
    monkeypatch.setenv("NEMO_GYM_URL", SERVERS)
    world.coordinator.now.down_servers = ("http://b:1",)
    world.play("train", "a", 1.0)
    _, metrics = draw(sampler(world))
    assert metrics["browser/servers_down"] == 1.0
    assert "of 2 environment servers, down are: http://b:1" in caplog.text


def test_groups_without_rows_or_reports_point_at_the_agent_loop(world):
    world.queue.add_group("train", "a", {}, status="failure")
    with pytest.raises(EnvironmentHalt, match="Error in _run_prompt"):
        draw(sampler(world))


def test_an_invalid_validation_rollout_is_missing_and_both_rates_have_their_denominator(world):
    world.play("val", "a", 1.0, 1.0, 0.0, SEED_TIMEOUT)
    buffer = sampler(world)
    batch, _ = draw(buffer, partition="val")
    assert len(batch.keys) == 3
    metrics = buffer.pop_validation_metrics()
    assert metrics["browser/val/success_over_valid"] == pytest.approx(2 / 3)
    assert metrics["browser/val/success_over_all"] == pytest.approx(2 / 4)
    assert (metrics["browser/val/rollouts_valid"], metrics["browser/val/rollouts"]) == (3.0, 4.0)
    assert buffer.pop_validation_metrics() == {}


def test_flagged_validation_rows_do_not_reach_verl(world, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_BROWSER_DROP_INVALID", "0")
    world.play("val", "a", 1.0, SEED_TIMEOUT, 0.0, keep_flagged=True)
    batch, _ = draw(sampler(world), partition="val")
    assert sorted(batch.keys) == ["a_0_0", "a_2_0"]
    assert len(batch.tags) == 2
    assert "a_1_0" not in world.queue.tags["val"]


def test_a_validation_without_a_valid_rollout_halts_with_the_clear_error(world):
    world.play("val", "a", SEED_TIMEOUT, SEED_TIMEOUT)
    with pytest.raises(EnvironmentHalt, match="Validation at step 1: 2 of 2 rollouts invalid"):
        draw(sampler(world), partition="val")


def test_session_metrics_are_those_of_the_step(world):
    buffer = sampler(world)
    world.play("train", "a", 1.0)
    world.coordinator.now = SimpleNamespace(opened=5, closed=3, open_now=2, down_s=0.0, down_servers=())
    draw(buffer, 1)
    world.play("train", "b", 1.0)
    world.coordinator.now = SimpleNamespace(opened=9, closed=9, open_now=0, down_s=0.0, down_servers=())
    _, metrics = draw(buffer, 2)
    assert metrics["browser/sessions_opened"] == 4.0
    assert metrics["browser/sessions_closed"] == 6.0
    assert metrics["browser/sessions_open"] == 0.0


class Trainer:
    """Stands in for verl's trainer, whose bound method refills the sampler."""

    agent_loop_manager = "workers"

    def refill(self, count):
        raise AssertionError("not in this test")


@BOTH
@pytest.mark.parametrize("dead", [[], [(1, "killed")]], ids=["all alive", "one dead"])
def test_a_worker_that_died_ends_the_wait_for_its_rollouts(world, monkeypatch, cls, dead):
    asked = []
    monkeypatch.setattr(browser_sampler, "dead_workers", lambda manager: asked.append(manager) or dead)
    monkeypatch.setattr(browser_sampler, "_WORKER_CHECK_S", 0.0)
    world.refill = Trainer().refill
    buffer = sampler(world, cls)
    polls = []

    def poll(self, partition_id, last_debug_time):
        polls.append(partition_id)
        if len(polls) == 3:
            world.play("train", "a", 1.0)
        return last_debug_time

    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._wait_for_next_poll", poll)
    if dead:
        with pytest.raises(WorkerDied, match="Agent-loop worker 1 is gone.*killed.*checkpoint is intact"):
            draw(buffer)
        assert polls == []
    else:
        batch, _ = draw(buffer)
        assert batch.keys == ["a_0_0"]
        assert asked == ["workers"] * 3


def test_workers_are_not_asked_at_every_poll(world, monkeypatch):
    monkeypatch.setattr(browser_sampler, "dead_workers", lambda manager: pytest.fail("asked within the first minute"))
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._wait_for_next_poll", lambda *args: 0.0)
    sampler(world)._wait_for_next_poll("train", 0.0)


@pytest.mark.parametrize(
    ("sampler_kwargs", "message"),
    [
        ({"max_invalid_share": 1.5}, "max_invalid_share=1.5: must be a number from 0 to 1"),
        ({"max_invalid_share": True}, "max_invalid_share=True: must be a number"),
        ({"halt_after_steps": 0}, "halt_after_steps=0: must be a whole number of at least 1"),
        ({"halt_afer_steps": 3}, "halt_afer_steps: no such key"),
        ({"filter_groups": {"enable": True}}, "algorithm.filter_groups.enable=true: not supported"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(world, sampler_kwargs, message):
    with pytest.raises(ValueError) as error:
        sampler(world, **sampler_kwargs)
    assert message in str(error.value)


def test_the_trainers_process_is_the_first_to_ask_for_the_coordinator(world):
    """Whoever asks first starts it, and its counts end with that process."""
    sampler(world)
    assert world.coordinator.asked == 1


def test_without_the_patch_there_is_no_sampler(world, monkeypatch):
    def refuse():
        raise RuntimeError("patch is off")

    monkeypatch.setattr(patches, "require_applied", refuse)
    with pytest.raises(RuntimeError, match="patch is off"):
        sampler(world)
