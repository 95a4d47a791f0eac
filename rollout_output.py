"""What a rollout hands to verl: one AgentLoopOutput for each training row, or a flagged one for an invalid rollout."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from call_forest import Row
from episode import Episode

# Short, since a row takes part in every forward pass of its batch.
_FLAGGED_PROMPT_TOKENS = 8


def row_outputs(episode: Episode, attempts: int) -> list[AgentLoopOutput]:
    """Return a valid rollout's rows in verl's order; each has the reward, the flags and the rollout's numbers.

    verl reads a rollout's reward off the last one and copies it to the others.
    """
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs,
            reward_score=episode.reward,
            num_turns=2 * len(row.calls) + 1,
            metrics=_metrics(episode),
            extra_fields=_extra_fields(episode, attempts, number, len(episode.rows)) | _weights_of(row),
        )
        for number, row in enumerate(episode.rows)
    ]


def flagged_output(
    episode: Episode, attempts: int, global_step: int, eos: int, prompt_length: int, logprobs: bool
) -> AgentLoopOutput:
    """Return a row that says only why the rollout is invalid: no token of a spoiled attempt, nothing trained.

    The reward of 0 is there because every row needs one; nothing reads it (patches.py, group_stats.py).
    """
    weights = {"global_steps": global_step, "min_global_steps": global_step, "max_global_steps": global_step}
    return AgentLoopOutput(
        prompt_ids=[eos] * min(_FLAGGED_PROMPT_TOKENS, prompt_length),
        response_ids=[eos],
        response_mask=[0],
        response_logprobs=[0.0] if logprobs else None,
        reward_score=0.0,
        num_turns=0,
        metrics=_metrics(episode),
        extra_fields=weights | _extra_fields(episode, attempts, 0, 1),
    )


def _weights_of(row: Row) -> dict[str, int]:
    """Return the oldest and the newest weight version of the row's trained tokens, where the engine told them."""
    steps = row.global_steps
    return {"min_global_steps": steps[0], "max_global_steps": steps[1]} if steps else {}


def _metrics(episode: Episode) -> AgentLoopMetrics:
    return AgentLoopMetrics(
        generate_sequences=episode.generation_s,
        tool_calls=episode.session.environment_s,
        num_preempted=episode.num_preempted,
    )


def _extra_fields(episode: Episode, attempts: int, row: int, rows: int) -> dict[str, Any]:
    return {
        **episode.engine_fields,
        "turn_scores": [],
        "tool_rewards": [],
        "env_invalid": episode.failure is not None,
        "failure_kind": str(episode.failure.kind) if episode.failure else "",
        "rollout_row": row,
        "rollout_rows": rows,
        "attempts": attempts,
        "reward_extra_info": episode.reward_extra_info(),
    }
