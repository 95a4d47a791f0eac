"""Plays a policy on simulated long tasks with its context compacted, and measures what becomes of it."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from cpu.long_context import ContextLimits, LongEpisode, Rendering
from cpu.long_tasks import OrderTask
from cpu.policy_evaluation import sample_replies
from cpu.practice_browser import SimulatedEpisode
from episode import StopReason


@dataclass(frozen=True)
class LongFigures:
    """What a set of long episodes came to; means over episodes."""

    success: float
    standard_error: float
    """Of the success over tasks: samples of one task are not independent, so each task counts once."""
    turns: float
    compactions: float
    rows: float
    context_full: float
    """Share of the episodes that ended because their context was full."""

    def __str__(self) -> str:
        return (
            f"success {self.success:.3f} ± {self.standard_error:.3f}  turns {self.turns:.1f}  "
            f"compactions {self.compactions:.2f}  rows {self.rows:.2f}  context full {self.context_full:.2f}"
        )


def play_long_policy(
    model: Qwen3ForCausalLM,
    rendering: Rendering,
    tasks: Sequence[OrderTask],
    base_url: str,
    limits: ContextLimits,
    *,
    greedy: bool = False,
) -> list[LongEpisode]:
    """Return one episode for each task, played to its end by the policy, sampled at temperature 1 unless greedy."""
    played = [LongEpisode(SimulatedEpisode(task, base_url), limits, rendering) for task in tasks]
    tokenizer, max_tokens = rendering.tokenizer, max(limits.max_reply, limits.max_summary)
    while running := [one for one in played if one.stop_reason is None]:
        prompts = [one.prompt_ids for one in running]
        for one, reply in zip(running, sample_replies(model, tokenizer, prompts, greedy, max_tokens), strict=True):
            one.take(_text(reply, tokenizer))
    return played


def _text(reply: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    ended = reply[-1:] == [tokenizer.eos_token_id]
    return tokenizer.decode(reply[:-1] if ended else reply)


def long_figures(played: Sequence[LongEpisode]) -> LongFigures:
    """Return the figures of episodes that are over."""
    rewards = defaultdict(list)
    for one in played:
        rewards[one.episode.task.task_id].append(one.episode.reward)
    success, standard_error = success_over_tasks(list(rewards.values()))
    return LongFigures(
        success=success,
        standard_error=standard_error,
        turns=_mean([one.turns for one in played]),
        compactions=_mean([one.compactions for one in played]),
        rows=_mean([len(one.contexts) for one in played]),
        context_full=_mean([one.stop_reason is StopReason.CONTEXT_FULL for one in played]),
    )


def success_over_tasks(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean reward and its standard error over tasks, given the rewards of each task's episodes."""
    means = [_mean(group) for group in rewards]
    spread = sum((mean - _mean(means)) ** 2 for mean in means) / max(1, len(means) - 1)
    return _mean([reward for group in rewards for reward in group]), math.sqrt(spread / len(means))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
