"""Real training over two environment servers, of which one dies for good: the other takes its rollouts.

verl's V1 trainer, Ray and vLLM are real; both servers are the fake one.
"""

from collections import Counter

import pytest

from episode_log import read_episodes
from tests.practice_environment import PracticeEnvironment
from tests.whole_training import new_folder, train_to_the_end

pytestmark = [pytest.mark.training, pytest.mark.timeout(900)]

STEPS, PROMPTS, ROLLOUTS = 4, 2, 8


def test_training_goes_on_with_the_server_that_is_left_and_no_rollout_is_lost(tmp_path):
    folder = new_folder(tmp_path)
    with PracticeEnvironment() as dying, PracticeEnvironment() as other:

        def stop_one_after_the_first_step(training):
            if folder.last_checkpoint() >= 1:
                dying.stop()

        exit_code = train_to_the_end(
            folder,
            f"{dying.url}, {other.url}",
            [
                f"trainer.total_training_steps={STEPS}",
                f"data.train_batch_size={PROMPTS}",
                f"actor_rollout_ref.rollout.n={ROLLOUTS}",
                "trainer.test_freq=-1",
                "trainer.val_before_train=false",
                "trainer.save_freq=1",
            ],
            {"NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "8", "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS": "4"},
            stop_one_after_the_first_step,
        )
    assert exit_code == 0, folder.log.read_text()[-3000:]
    episodes, problems = read_episodes(folder.episodes)
    assert problems == []
    by_step = Counter((episode["global_step"], episode["server"]) for episode in episodes)
    assert by_step[1, dying.url] == by_step[1, other.url] == PROMPTS * ROLLOUTS // 2
    assert by_step[STEPS, dying.url] == 0
    assert by_step[STEPS, other.url] == PROMPTS * ROLLOUTS
    # Only what was on the server when it died is spoiled, and tried again on the other.
    assert all(episode["server"] == dying.url for episode in episodes if episode["failure_kind"])
    metrics = folder.metrics()
    for step in range(1, STEPS + 1):
        assert metrics[step]["browser/rollouts_valid"] == metrics[step]["browser/rollouts"] == PROMPTS * ROLLOUTS
    assert (metrics[1]["browser/servers_down"], metrics[STEPS]["browser/servers_down"]) == (0.0, 1.0)
