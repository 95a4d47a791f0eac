"""The warnings of loss aggregations, held against verl's own `agg_loss`."""

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

from loss_aggregation import rollouts_have_several_rows, warning_of

SEVERAL = {"context_policy": "summary"}


@pytest.mark.parametrize(
    ("browser", "want"),
    [
        (None, False),
        ({}, False),
        ({"context_policy": "append"}, False),
        ({"context_policy": "append", "selection_policy": "main_chain", "retry_unusable_calls": 2}, False),
        ({"selection_policy": "returned_history"}, False),
        ({"selection_policy": "every_call"}, True),
        ({"context_policy": "window"}, True),
        ({"context_policy": "window", "selection_policy": "main_chain"}, True),
    ],
    ids=str,
)
def test_rollouts_have_one_row_unless_the_settings_let_them_have_more(browser, want):
    assert rollouts_have_several_rows(browser) is want


@pytest.mark.parametrize(
    ("mode", "browser", "said"),
    [
        ("token-mean", SEVERAL, None),
        ("token-sum", SEVERAL, None),
        ("seq-mean-token-mean", SEVERAL, "a rollout in k rows weighs k times as much as one in a single row"),
        ("seq-mean-token-sum", SEVERAL, "divides by the number of rows of the mini-batch: tokens weigh the same"),
        ("seq-mean-token-sum-norm", SEVERAL, "by the longest response of each micro-batch"),
        ("seq-mean-token-mean", {}, None),
        ("seq-mean-token-mean", None, None),
        ("of a later verl", SEVERAL, None),
    ],
)
def test_what_is_warned_of_says_what_the_aggregation_does(mode, browser, said):
    warning = warning_of(mode, browser)
    assert (warning is None) == (said is None)
    if said:
        assert said in warning
        assert warning.startswith(f"actor_rollout_ref.actor.loss_agg_mode={mode} ")


@pytest.mark.parametrize(
    ("mode", "scale", "of_rollout", "of_batch"),
    [
        # Loss of the split rollout over that of the other, and of the batch over that of the same tokens in 2 rows.
        ("token-mean", None, 1.0, 1.0),
        ("token-sum", None, 1.0, 1.0),
        ("seq-mean-token-mean", None, 2.0, None),
        ("seq-mean-token-sum", None, 1.0, 2 / 3),
        ("seq-mean-token-sum-norm", 4, 1.0, 2 / 3),
        ("seq-mean-token-sum-norm", None, 1.0, 2 / 3),
    ],
)
def test_verl_aggregates_as_the_warnings_say(mode, scale, of_rollout, of_batch):
    def loss(masks, global_batch_size, split=True, other=True):
        mask = torch.tensor(masks)
        values = torch.zeros(mask.shape) + torch.tensor([[float(split)]] * (len(masks) - 1) + [[float(other)]])
        return agg_loss(
            values, mask, mode, 1, batch_num_tokens=8, global_batch_size=global_batch_size, loss_scale_factor=scale
        ).item()

    split, whole = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 1, 1], [1, 1, 1, 1]]
    ratio = loss(split, 3, other=False) / loss(split, 3, split=False)
    assert ratio == pytest.approx(of_rollout)
    if of_batch is not None:
        assert loss(split, 3) / loss(whole, 2) == pytest.approx(of_batch)


def test_without_a_scale_factor_the_norm_is_the_width_of_the_micro_batch():
    def loss(width):
        ones = torch.ones(1, 2)
        mask, values = (torch.nn.functional.pad(ones, (0, width - 2)) for _ in range(2))
        return agg_loss(values, mask, "seq-mean-token-sum-norm", 1, 2, 1).item()

    assert loss(4) == pytest.approx(2 * loss(8))
