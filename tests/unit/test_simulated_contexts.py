"""The simulator that the small policy is trained on compacts a context as the agent loop does, token for token."""

import json
import random

import pytest

from context_policy import ContextPolicy
from cpu.demonstrations import Habits, sloppy_arguments
from cpu.long_context import ContextLimits, LongEpisode, Rendering
from cpu.long_demonstrations import build_long_tokenizer, call_text, expert_arguments, summary_text
from cpu.long_tasks import make_orders
from cpu.policy_tokenizer import tool_schema
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Split
from dataset import columns
from episode_log import read_episodes
from rollout_rows import read_rows
from tests.agent_loop_harness import ScriptedPolicy, make_loop
from tests.fake_environment import FakeEnvironment
from tests.practice_environment import VALIDATION_SITE, practice_browsers

SLOPPY = Habits(wrong_element=0.15, early_finish=0.02)
# Broken JSON is not among them: its message and a page are longer than a prompt may be, and only the loop cuts.
UNUSABLE = ("no call", call_text({"action": "click", "element": "nowhere"}))
TWICE = 2 * call_text({"action": "observe"})


@pytest.fixture(scope="module")
def rendering():
    schema = tool_schema()
    return Rendering(build_long_tokenizer(schema), schema)


def reply_of(episode, rng) -> str:
    """Return an expert's next reply, which now and then is none that can be run, or two calls at once."""
    if episode.summarising:
        return summary_text(episode.episode)
    whim = rng.random()
    if whim < 0.1:
        return rng.choice(UNUSABLE)
    return TWICE if whim < 0.15 else call_text(sloppy_arguments(episode.episode, SLOPPY, rng, expert_arguments))


def simulated(order, limits, rendering, rng):
    """Return the simulated episode played to its end, what was read before each reply, and the replies."""
    episode = LongEpisode(SimulatedEpisode(order, VALIDATION_SITE), limits, rendering)
    prompts, replies = [], []
    while episode.stop_reason is None:
        prompts.append(list(episode.prompt_ids))
        replies.append(reply_of(episode, rng))
        episode.take(replies[-1])
    return episode, prompts, replies


async def rolled_out(order, limits, rendering, replies, base_config, folder):
    """Return the prompts that the agent loop gives the engine when the policy replies so, its rows and its record."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    config = base_config.copy()
    for override in OverridesParser.create().parse_overrides(limits.overrides()):
        OmegaConf.update(config, override.key_or_group, override.value())
    row_file = folder / "row.jsonl"
    row_file.write_text(json.dumps(order.row(VALIDATION_SITE)) + "\n")
    (row,) = read_rows([row_file])
    policy = ScriptedPolicy(rendering.tokenizer, replies)
    async with FakeEnvironment(browser_factory=practice_browsers(VALIDATION_SITE)) as environment:
        loop = make_loop(config, rendering.tokenizer, policy, environment.url, folder)
        rows = await loop.run({}, uid="u", session_id=0, global_steps=1, **columns(row, 0))
    records, _ = read_episodes(folder)
    return policy.prompts, rows, records[-1]


@pytest.mark.parametrize("policy", list(ContextPolicy))
@pytest.mark.parametrize(("budget", "window"), [(ContextLimits().budget, 1), (260, 2), (200, 2)])
async def test_engine_reads_in_the_loop_what_the_simulator_shows(
    rendering, base_config, monkeypatch, tmp_path, policy, budget, window
):
    monkeypatch.setenv("NEMO_GYM_URL", "http://127.0.0.1:1")
    limits = ContextLimits(policy=policy, budget=budget, window=window, max_prompt=260)
    rng = random.Random(f"{policy} {budget}")
    texts = rendering.tokenizer.batch_decode
    for number, order in enumerate(make_orders(Split.VALIDATION, 4)):
        episode, expected, replies = simulated(order, limits, rendering, rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        prompts, rows, record = await rolled_out(order, limits, rendering, replies, base_config, folder)
        assert texts(prompts) == texts(expected)
        assert prompts == expected
        assert len(rows) == len(episode.contexts) == record["rows"]
        told = (record["stop_reason"], record["turns"], record["compactions"], record["reward"])
        assert told == (episode.stop_reason, episode.turns, episode.compactions, episode.episode.reward)
