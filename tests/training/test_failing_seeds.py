"""Real training while 91% of the seeds fail, and all of a first batch: only valid rollouts train, or the run halts.

verl's V1 trainer, Ray and vLLM are real; the environment is the fake one, which fails on demand.
"""

import json
import math
import os
import signal
from pathlib import Path

import pytest

from cpu.training_run import RunFolder
from episode_log import read_episodes
from tests.practice_environment import PracticeEnvironment
from tests.whole_training import new_folder, train_to_the_end

pytestmark = [pytest.mark.training, pytest.mark.timeout(900)]

FAILING = 0.91
STEPS, PROMPTS, ROLLOUTS = 2, 3, 16


def train(folder, url, drop_invalid, *overrides, max_open=32, while_running=lambda training: None) -> int:
    """Train to the end and return the exit code; nothing is left running."""
    settings = {
        "NEMO_GYM_BROWSER_DROP_INVALID": str(int(drop_invalid)),
        "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": str(max_open),
        "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS": "32",
        "NEMO_GYM_BROWSER_OUTAGE_AFTER_SEEDS": "1000000",
        "NEMO_GYM_BROWSER_OUTAGE_PATIENCE_S": "5",
    }
    overrides = [
        f"trainer.total_training_steps={STEPS}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "browser.max_attempts=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=1",
        "trainer.v1.sampler.sampler_kwargs.max_invalid_share=1.0",
        *overrides,
    ]
    return train_to_the_end(folder, url, overrides, settings, while_running)


def process_name(pid: int) -> str:
    """Return what a process calls itself, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture(scope="module", params=["dropped", "flagged"])
def run(request, tmp_path_factory):
    """The finished run's folder and its mode."""
    folder = new_folder(tmp_path_factory.mktemp(request.param))
    with PracticeEnvironment(FAILING, failing_first=PROMPTS * ROLLOUTS) as environment:
        validate = ["data.val_max_samples=4", "trainer.test_freq=2"]
        exit_code = train(folder, environment.url, request.param == "dropped", *validate)
    assert exit_code == 0, folder.log.read_text()[-3000:]
    return folder, request.param


def dumped(folder: RunFolder) -> dict[tuple[str, int], float]:
    """Return the scores in the dumped batches by group and rollout."""
    scores = {}
    for path in folder.rollouts.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            uid, rollout, _ = row["uid"].rsplit("_", 2)
            if not uid.startswith("pad"):
                scores[uid, int(rollout)] = row["score"]
    return scores


def training_episodes(folder: RunFolder) -> list[dict]:
    episodes, problems = read_episodes(folder.episodes)
    assert problems == []
    return [episode for episode in episodes if episode["split"] != "validation"]


def test_most_rollouts_were_spoiled_and_none_of_them_has_a_reward(run):
    folder, _ = run
    spoiled = [episode for episode in training_episodes(folder) if episode["failure_kind"]]
    assert len(spoiled) > PROMPTS * ROLLOUTS + 0.8 * STEPS * PROMPTS * ROLLOUTS
    assert {episode["failure_kind"] for episode in spoiled} == {"browser_launch_failed"}
    assert all(episode["reward"] is None for episode in spoiled)


def test_the_dumped_batches_hold_the_valid_rollouts_and_dropped_ones_never(run):
    folder, mode = run
    valid = {(e["uid"], e["rollout"]): e["reward"] for e in training_episodes(folder) if not e["failure_kind"]}
    scores = dumped(folder)
    assert {key: scores[key] for key in scores if key in valid} == valid
    extra = len(scores) - len(valid)
    assert extra == (0 if mode == "dropped" else STEPS * PROMPTS * ROLLOUTS - len(valid))


def test_the_metrics_count_what_the_episode_log_holds(run):
    folder, mode = run
    valid = [e for e in training_episodes(folder) if not e["failure_kind"]]
    for step, data in folder.metrics().items():
        if "browser/rollouts" not in data:
            continue
        rewards = [e["reward"] for e in valid if e["global_step"] == step]
        # The first batch has no valid rollout: it is drawn again, within the same step.
        drawn = PROMPTS * ROLLOUTS * (2 if step == 1 else 1)
        assert data["browser/rollouts"] == drawn
        assert data["browser/rollouts_valid"] == data["browser/batch_rollouts_valid"] == len(rewards)
        assert data["browser/invalid_share"] == pytest.approx(1 - len(rewards) / drawn)
        assert data["browser/reward_over_valid/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert data["browser/batch_rollouts_invalid"] == (0 if mode == "dropped" else PROMPTS * ROLLOUTS - len(rewards))


def test_every_step_trained_with_finite_numbers(run):
    folder, _ = run
    steps = [data for data in folder.metrics().values() if "actor/grad_norm" in data]
    assert len(steps) == STEPS
    for data in steps:
        assert math.isfinite(data["actor/grad_norm"])
        assert math.isfinite(data["actor/pg_loss"])
        assert data["training/rollout_probs_diff_max"] < 1e-5


def test_the_validation_reports_both_rates(run):
    folder, _ = run
    last = folder.metrics()[STEPS]
    assert last["browser/val/rollouts"] == last["browser/val/rollouts_valid"] == 12
    assert last["browser/val/success_over_valid"] == last["browser/val/success_over_all"]


def test_an_environment_that_goes_away_halts_training_with_the_checkpoint_intact(tmp_path):
    folder = new_folder(tmp_path)
    with PracticeEnvironment() as environment:

        def stop_after_the_first_step(training):
            if folder.last_checkpoint() >= 1:
                environment.stop()

        exit_code = train(
            folder, environment.url, True, "trainer.total_training_steps=50", while_running=stop_after_the_first_step
        )
    assert exit_code != 0
    log = folder.log.read_text()
    assert "EnvironmentHalt: The environment is down at step" in log
    assert "the last checkpoint is intact" in log
    checkpoint = folder.checkpoints / f"global_step_{folder.last_checkpoint()}"
    assert (checkpoint / "actor").is_dir() and any((checkpoint / "actor").iterdir())


def test_a_killed_agent_loop_worker_ends_training_instead_of_leaving_it_to_wait(tmp_path):
    folder = new_folder(tmp_path)
    killed = []

    def kill_the_worker(training):
        # While rollouts are under way: once all are over, the next dispatch fails by itself.
        if killed or not any(episode["global_step"] == 2 for episode in read_episodes(folder.episodes)[0]):
            return
        killed.extend(pid for pid in training.tree.pids() if "AgentLoopWorker" in process_name(pid))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    # 48 rollouts, 8 at a time, each at least 4 s: the first is over long before the last.
    slow = ["trainer.total_training_steps=50"]
    with PracticeEnvironment(observe_s=4.0) as environment:
        exit_code = train(folder, environment.url, True, *slow, max_open=8, while_running=kill_the_worker)
    assert killed and exit_code != 0
    assert "WorkerDied: Agent-loop worker 0 is gone" in folder.log.read_text()
