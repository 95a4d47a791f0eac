"""Real training on rollouts of one and of several rows: advantages, log-probs, optimizer steps.

verl's V1 trainer, Ray and vLLM are real; the environment is the fake one, which plays the practice site.
"""

import json
import math
import statistics
from collections import defaultdict

import pytest

from cpu.training_run import RunFolder
from episode_log import read_episodes
from tests.own_selection import TRACE_FOLDER
from tests.practice_environment import PracticeEnvironment
from tests.recording_sampler import BATCHES_FILE
from tests.whole_training import new_folder, train_to_the_end

pytestmark = [pytest.mark.training, pytest.mark.timeout(900)]

STEPS, PROMPTS, ROLLOUTS, MINI_BATCH, EPOCHS = 2, 4, 5, 2, 3
# A turn takes about 50 tokens of the small policy's vocabulary: rollouts of three turns and more need a fresh context.
CONTEXT = {
    "window": ["browser.window_observations=1", "data.max_response_length=128"],
    "summary": [
        "browser.max_summary_tokens=32",
        "browser.context_budget_tokens=160",
        "data.max_response_length=448",
    ],
}


@pytest.fixture(scope="module", params=list(CONTEXT))
def run(request, tmp_path_factory):
    """The finished run's folder and the recorded batches."""
    folder = new_folder(tmp_path_factory.mktemp(request.param))
    overrides = [
        f"trainer.total_training_steps={STEPS}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
        f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.v1.sampler.custom_sampler.path=pkg://tests.recording_sampler",
        "trainer.v1.sampler.custom_sampler.name=RecordingReplayBuffer",
        f"browser.context_policy={request.param}",
        "browser.selection_policy=tests.own_selection:kept_calls",
        *CONTEXT[request.param],
    ]
    batches, trace = folder.root / "batches.jsonl", folder.root / "selection"
    trace.mkdir()
    settings = {"NEMO_GYM_BROWSER_DROP_INVALID": "1", BATCHES_FILE: str(batches), TRACE_FOLDER: str(trace)}
    with PracticeEnvironment() as environment:
        exit_code = train_to_the_end(folder, environment.url, overrides, settings)
    assert exit_code == 0, folder.log.read_text()[-3000:]
    return folder, [json.loads(line) for line in batches.read_text().splitlines()]


def real_rows(batch: dict) -> list[dict]:
    return [row for row in batch["rows"] if not row["padding"]]


def by_rollout(batch: dict) -> dict[tuple[str, str], list[dict]]:
    """Return the rows of each rollout by (uid, rollout)."""
    found = defaultdict(list)
    for row in real_rows(batch):
        uid, rollout, _ = row["key"].rsplit("_", 2)
        found[uid, rollout].append(row)
    return found


def test_groups_mix_rollouts_of_one_row_and_of_several(run):
    folder, batches = run
    assert len(batches) == STEPS
    counts = [len(rows) for batch in batches for rows in by_rollout(batch).values()]
    assert len(counts) == STEPS * PROMPTS * ROLLOUTS
    assert min(counts) == 1 and max(counts) > 1
    episodes, _ = read_episodes(folder.episodes)
    assert sorted(counts) == sorted(episode["rows"] for episode in episodes)
    for batch in batches:
        for rows in by_rollout(batch).values():
            assert sorted(row["row"] for row in rows) == [[n, len(rows)] for n in range(len(rows))]


def test_advantages_are_those_of_one_vote_a_rollout(run):
    _, batches = run
    informative = 0
    for batch in batches:
        groups = defaultdict(list)
        for (uid, _), rows in by_rollout(batch).items():
            assert len({row["reward"] for row in rows}) == 1
            groups[uid].append(rows)
        for rollouts in groups.values():
            rewards = [rows[0]["reward"] for rows in rollouts]
            mean, std = statistics.mean(rewards), statistics.stdev(rewards)
            informative += std > 0 and len({len(rows) for rows in rollouts}) > 1
            for rows, reward in zip(rollouts, rewards, strict=True):
                for row in rows:
                    assert row["advantages"] == pytest.approx([(reward - mean) / (std + 1e-6)], abs=1e-5)
    assert informative > 0, "no group mixed rewards and numbers of rows, so nothing was compared"


def test_engine_and_trainer_agree_on_every_log_prob_of_compacted_rows(run):
    folder, _ = run
    differences = [data["training/rollout_probs_diff_max"] for data in folder.metrics().values()]
    assert len(differences) == STEPS
    assert max(differences) < 1e-5


def test_optimizer_steps_are_those_of_the_config_and_no_padding_row_is_needless(run):
    folder, batches = run
    steps = PROMPTS // MINI_BATCH
    for batch in batches:
        rows, padding = len(real_rows(batch)), len(batch["rows"]) - len(real_rows(batch))
        assert len(batch["rows"]) == steps * batch["mini_batch"]
        assert padding == -rows % steps
        for number in range(steps):
            mini_batch = batch["rows"][number * batch["mini_batch"] : (number + 1) * batch["mini_batch"]]
            assert sum(not row["padding"] for row in mini_batch) in (rows // steps, math.ceil(rows / steps))
    assert optimizer_steps(folder) == {step: step * steps * EPOCHS for step in range(1, STEPS + 1)}


def optimizer_steps(folder: RunFolder) -> dict[int, int]:
    """Return how many steps AdamW counted until each checkpoint."""
    import torch

    counted = {}
    for step in range(1, STEPS + 1):
        (path,) = (folder.checkpoints / f"global_step_{step}" / "actor").glob("optim_*.pt")
        state = torch.load(path, weights_only=False)["state"]
        counted[step] = int(next(iter(state.values()))["step"])
    return counted


def test_every_trained_token_was_generated_once(run):
    folder, batches = run
    episodes, _ = read_episodes(folder.episodes)
    for batch in batches:
        for rows in by_rollout(batch).values():
            assert all(row["trained_tokens"] > 0 and len(row["advantages"]) == 1 for row in rows)
    assert any(episode["compactions"] > 0 for episode in episodes)
    assert all(episode["rows"] == episode["compactions"] + 1 for episode in episodes)
    # Tokens of all rows as the trainer had them, and as the loop counted them.
    trained = sum(len(row["input_ids"]) for batch in batches for row in real_rows(batch))
    assert trained == sum(episode["prompt_tokens"] + episode["response_tokens"] for episode in episodes)


def test_users_own_selection_policy_runs_in_the_agent_loop_workers(run):
    folder, _ = run
    ran_in = {int(path.name) for path in (folder.root / "selection").iterdir()}
    logged = {int(path.stem.rpartition("-")[2]) for path in folder.episodes.glob("episodes-*.jsonl")}
    assert ran_in == logged
