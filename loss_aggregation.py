"""What verl's loss aggregations make of a rollout in several rows: a warning for each that sees how it was split.

`token-mean`, verl's default, and `token-sum` weigh tokens, however they are divided among rows. What is said of the
others is read from verl 0.9.1, verl/trainer/ppo/core_algos.py, `agg_loss`, with the rows of a mini-batch as its
`global_batch_size`.
"""

from collections.abc import Mapping
from typing import Any

_ROWS_DIVIDE = (
    "sums over tokens and divides by the number of rows of the mini-batch: tokens weigh the same, but a batch of split "
    "rollouts gets a smaller gradient than the same tokens in fewer rows"
)

_EFFECTS = {
    "seq-mean-token-mean": "averages over rows: a rollout in k rows weighs k times as much as one in a single row",
    "seq-mean-token-sum": _ROWS_DIVIDE,
    "seq-mean-token-sum-norm": (
        f"{_ROWS_DIVIDE}. It divides by actor.loss_scale_factor too; unless that is set, by the longest response of "
        "each micro-batch, and then tokens weigh the same only within one"
    ),
}


def warning_of(mode: str, browser: Mapping[str, Any] | None) -> str | None:
    """Return what to log of a `loss_agg_mode` that sees how rollouts are split into rows, None if there is nothing.

    - `mode`: one that is not known here is verl's to refuse.
    - `browser`: the config's section of that name, None if it has none.
    """
    if mode not in _EFFECTS or not rollouts_have_several_rows(browser):
        return None
    return (
        f"actor_rollout_ref.actor.loss_agg_mode={mode} {_EFFECTS[mode]}. token-mean weighs tokens, however rollouts "
        "are split."
    )


def rollouts_have_several_rows(browser: Mapping[str, Any] | None) -> bool:
    """Return whether the settings in the config's section `browser` let a rollout have more than one row."""
    browser = browser or {}
    append = browser.get("context_policy", "append") == "append"
    one_row = browser.get("selection_policy", "returned_history") in ("returned_history", "main_chain")
    return not (append and one_row)
