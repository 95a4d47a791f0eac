"""The env-aware GRPO estimator: its properties, its agreement with the installed verl, and people's field reports."""

import dataclasses
import itertools
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from group_stats import ESTIMATOR_NAME, compute_grpo_env_aware_advantage, group_metrics, register_with_verl

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 4
REWARDS = st.floats(-100, 100, width=32)
# A busy machine must not fail a property.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclasses.dataclass(frozen=True)
class Batch:
    """The estimator's arguments as plain lists, one entry a row."""

    rewards: list[list[float]]
    mask: list[list[int]]
    uid: list[str]
    rollout_id: list[str]
    row_index: list[int]
    env_invalid: list[bool]

    def rows(self, numbers) -> "Batch":
        """Return these rows in this order."""
        return Batch(*([getattr(self, field.name)[i] for i in numbers] for field in dataclasses.fields(self)))

    def __len__(self) -> int:
        return len(self.uid)

    @property
    def flags(self) -> dict:
        return {
            "env_invalid": np.array(self.env_invalid, dtype=bool),
            "rollout_id": np.array(self.rollout_id, dtype=object),
            "row_index": np.array(self.row_index, dtype=int),
        }

    def advantages(self, **options) -> torch.Tensor:
        rewards = torch.tensor(self.rewards, dtype=torch.float32).reshape(-1, TOKENS)
        mask = torch.tensor(self.mask, dtype=torch.long).reshape(-1, TOKENS)
        uid = np.array(self.uid, dtype=object)
        return compute_grpo_env_aware_advantage(rewards, mask, uid, **self.flags, **options)[0]


def outcome(rewards: list[float]) -> torch.Tensor:
    """Return each reward on the last of TOKENS tokens."""
    return torch.tensor([[0.0] * (TOKENS - 1) + [reward] for reward in rewards])


def scalars(rewards: list[float], uid: list[str] | None = None, **options) -> list[float]:
    """Return the advantage of each row, all of whose tokens are trained."""
    arguments = (outcome(rewards), torch.ones(len(rewards), TOKENS), uid or ["a"] * len(rewards))
    advantages, returns = compute_grpo_env_aware_advantage(*arguments, **options)
    assert advantages.dtype == torch.float32 and advantages.shape == (len(rewards), TOKENS)
    assert torch.equal(advantages, returns)
    assert (advantages == advantages[:, :1]).all()
    return advantages[:, 0].tolist()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@st.composite
def batches(draw, max_rows_of_rollout: int = 3, with_invalid: bool = True, min_rollouts: int = 1) -> Batch:
    """Groups of rollouts of rows, in any order; the rewards lie on any token and differ between a rollout's rows."""
    rows = []
    for group, rollout in itertools.product(range(draw(st.integers(1, 3))), range(draw(st.integers(min_rollouts, 5)))):
        for place in range(draw(st.integers(1, max_rows_of_rollout))):
            rewards = draw(st.lists(REWARDS, min_size=TOKENS, max_size=TOKENS))
            mask = draw(st.lists(st.integers(0, 1), min_size=TOKENS, max_size=TOKENS))
            invalid = with_invalid and draw(st.sampled_from([False, False, True]))
            rows.append((rewards, mask, f"g{group}", f"g{group}_{rollout}", place, invalid))
    rows = draw(st.permutations(rows))
    return Batch(*(list(column) for column in zip(*rows, strict=True)))


def flagged_rollouts(batch: Batch) -> set[str]:
    return {rollout for rollout, invalid in zip(batch.rollout_id, batch.env_invalid, strict=True) if invalid}


# Properties


@PROPERTY
@given(batches(max_rows_of_rollout=1, with_invalid=False, min_rollouts=2), st.booleans())
def test_without_flags_it_equals_verls_grpo_to_float_precision(batch, by_std):
    rewards, mask = torch.tensor(batch.rewards), torch.tensor(batch.mask)
    uid = np.array(batch.uid, dtype=object)
    options = {"norm_adv_by_std_in_grpo": by_std}
    ours, _ = compute_grpo_env_aware_advantage(rewards, mask, uid, **options)
    verls, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, **options)
    # verl adds, averages and squares in float32: an error of a few float32 steps at the size of the group's largest
    # token reward, which a small std magnifies.
    step = torch.finfo(torch.float32).eps
    for group in set(batch.uid):
        members = torch.tensor([member == group for member in batch.uid])
        error = 16 * step * max(rewards[members].abs().max().item(), torch.finfo(torch.float32).tiny)
        if by_std:
            std = rewards[members].double().sum(-1).std().item()
            error = error * (1 + ours[members].abs().max().item()) / (max(std - error, 0) + 1e-6)
        assert (ours[members] - verls[members]).abs().max().item() <= error + 4 * step


@pytest.mark.parametrize("by_std", [True, False])
def test_at_rewards_of_zero_and_one_it_equals_verls_grpo_closely(by_std):
    rewards = outcome([1, 0, 0, 0, 1, 1, 0, 1, 0.25])
    mask = torch.ones(9, TOKENS)
    uid = np.array(["a", "a", "a", "b", "b", "a", "c", "c", "c"], dtype=object)
    options = {"norm_adv_by_std_in_grpo": by_std, "epsilon": 1e-3}
    ours, _ = compute_grpo_env_aware_advantage(rewards, mask, uid, **options)
    verls, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, **options)
    torch.testing.assert_close(ours, verls, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def verl_v1():
    """verl's functions around the estimators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about every engine that is not installed.
        from verl.trainer.ppo.v1 import utils
    return utils


@PROPERTY
@given(batch=batches(with_invalid=False, min_rollouts=2))
def test_with_several_rows_it_equals_verls_treatment_of_grpo(verl_v1, batch):
    # verl reads a voter's advantage at its first trained token, so it needs one there.
    batch = dataclasses.replace(batch, mask=[[1, *mask[1:]] for mask in batch.mask])
    rewards = torch.tensor(batch.rewards).round()
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": torch.tensor(batch.mask)},
        non_tensors={"uid": np.array(batch.uid, dtype=object)},
    )
    keys = [f"{rollout}_{place}" for rollout, place in zip(batch.rollout_id, batch.row_index, strict=True)]
    options = {"norm_adv_by_std_in_grpo": False}
    estimator = core_algos.AdvantageEstimator.GRPO
    verls = verl_v1.compute_advantage_for_multi_trajectories(data, keys, estimator, **options)
    ours = dataclasses.replace(batch, rewards=rewards.tolist()).advantages(**options)
    torch.testing.assert_close(ours, verls.batch["advantages"], rtol=1e-4, atol=1e-3)


@PROPERTY
@given(batches(), st.lists(REWARDS, min_size=1), st.booleans(), st.randoms())
def test_rewards_of_flagged_rollouts_change_no_other_row(batch, others, by_std, random):
    flagged = flagged_rollouts(batch)
    assume(flagged)
    rewards = [
        [random.choice(others) for _ in row] if rollout in flagged else row
        for row, rollout in zip(batch.rewards, batch.rollout_id, strict=True)
    ]
    before = batch.advantages(norm_adv_by_std_in_grpo=by_std)
    assert same_bits(before, dataclasses.replace(batch, rewards=rewards).advantages(norm_adv_by_std_in_grpo=by_std))


@PROPERTY
@given(batches(), st.booleans())
def test_leaving_flagged_rollouts_out_changes_no_other_row(batch, by_std):
    kept = [row for row, rollout in enumerate(batch.rollout_id) if rollout not in flagged_rollouts(batch)]
    without = batch.rows(kept).advantages(norm_adv_by_std_in_grpo=by_std)
    assert same_bits(batch.advantages(norm_adv_by_std_in_grpo=by_std)[kept], without)


@PROPERTY
@given(batches(), st.booleans(), st.data())
def test_order_of_rows_changes_nothing(batch, by_std, data):
    order = data.draw(st.permutations(range(len(batch))))
    before = batch.advantages(norm_adv_by_std_in_grpo=by_std)
    assert same_bits(before[order], batch.rows(order).advantages(norm_adv_by_std_in_grpo=by_std))


@pytest.mark.parametrize("by_std", [True, False])
def test_order_of_rows_changes_nothing_where_float64_sums_depend_on_order(by_std):
    # Added in one order the 3s vanish in a float64, in another they add up first.
    rewards = np.array([1e17, 3.0, 3.0, 3.0, -1e17, 3.0, 3.0, 1e-3], dtype=np.float32).tolist()
    expected = scalars(rewards, norm_adv_by_std_in_grpo=by_std)
    random = np.random.default_rng(0)
    for _ in range(50):
        order = random.permutation(len(rewards))
        shuffled = scalars([rewards[row] for row in order], norm_adv_by_std_in_grpo=by_std)
        assert shuffled == [expected[row] for row in order]


@pytest.mark.parametrize("by_std", [True, False])
def test_order_of_rows_changes_nothing_in_a_batch_of_training_size(by_std):
    random = np.random.default_rng(0)
    # Large rewards that cancel: what is left of the small ones depends on the order in which a row is added.
    large = random.normal(0, 1e17, (1024, 100))
    rewards = random.permuted(np.hstack([large, -large, random.normal(0, 9, (1024, 100))]), axis=1)
    rewards, mask = torch.from_numpy(rewards).float(), torch.ones(1024, 300)
    uid = np.array([f"g{row // 8}" for row in range(1024)], dtype=object)
    options = {"env_invalid": random.random(1024) < 0.3, "norm_adv_by_std_in_grpo": by_std}
    before, _ = compute_grpo_env_aware_advantage(rewards, mask, uid, **options)
    order = random.permutation(1024)
    options["env_invalid"] = options["env_invalid"][order]
    # Transposed and back: the same values in another memory layout.
    shuffled = rewards[order].T.contiguous().T
    after, _ = compute_grpo_env_aware_advantage(shuffled, mask, uid[order], **options)
    assert same_bits(before[order], after)


@PROPERTY
@given(batches(max_rows_of_rollout=1), st.integers(2, 4), st.booleans(), st.data())
def test_splitting_a_rollout_changes_no_other_and_gives_its_rows_one_advantage(batch, parts, by_std, data):
    split = data.draw(st.integers(0, len(batch) - 1))
    earlier = [data.draw(st.lists(REWARDS, min_size=TOKENS, max_size=TOKENS)) for _ in range(parts - 1)]
    rows = batch.rows([*range(len(batch)), *[split] * (parts - 1)])
    rows = dataclasses.replace(
        rows,
        rewards=batch.rewards + earlier,
        mask=[[1] * TOKENS for _ in range(len(rows))],
        row_index=[parts - 1 if row == split else 0 for row in range(len(batch))] + list(range(parts - 1)),
    )
    order = data.draw(st.permutations(range(len(rows))))
    after = torch.empty(len(rows), TOKENS)
    after[list(order)] = rows.rows(order).advantages(norm_adv_by_std_in_grpo=by_std)
    whole = dataclasses.replace(batch, mask=[[1] * TOKENS for _ in range(len(batch))])
    before = whole.advantages(norm_adv_by_std_in_grpo=by_std)
    assert same_bits(after[: len(batch)], before)
    assert same_bits(after[len(batch) :], before[split].expand(parts - 1, TOKENS))


@PROPERTY
@given(batches(), st.booleans())
def test_flagged_rollouts_get_exactly_zero_on_trained_tokens_too(batch, by_std):
    batch = dataclasses.replace(batch, mask=[[1] * TOKENS for _ in range(len(batch))])
    flagged = [rollout in flagged_rollouts(batch) for rollout in batch.rollout_id]
    advantages = batch.advantages(norm_adv_by_std_in_grpo=by_std)[torch.tensor(flagged)]
    assert same_bits(advantages, torch.zeros_like(advantages))


@PROPERTY
@given(batches(), st.integers(1, 4), st.booleans())
def test_groups_with_too_few_valid_rollouts_give_zero(batch, min_valid, by_std):
    valid = set(batch.rollout_id) - flagged_rollouts(batch)
    small = [sum(rollout.startswith(f"{group}_") for rollout in valid) < max(min_valid, 2) for group in batch.uid]
    advantages = batch.advantages(norm_adv_by_std_in_grpo=by_std, min_valid=min_valid)
    assert not advantages[torch.tensor(small)].any()


@PROPERTY
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), REWARDS, st.booleans())
def test_groups_of_equal_rewards_give_exactly_zero(sizes, reward, by_std):
    uid = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
    assert scalars([reward] * len(uid), uid, norm_adv_by_std_in_grpo=by_std) == [0.0] * len(uid)


def test_equal_sums_of_token_rewards_give_exactly_zero():
    for dtype in (torch.float32, torch.float64):
        # Added up five times in float64 and divided by five, this sum comes out as another number.
        rewards = torch.tensor([[0.2, 1e-9, 0.0, 0.0]] * 5, dtype=dtype)
        advantages, _ = compute_grpo_env_aware_advantage(rewards, torch.ones(5, TOKENS), ["a"] * 5)
        assert not advantages.any()


def test_small_token_rewards_beside_large_ones_are_not_lost():
    rewards = torch.tensor([[1e8, 1.0, -1e8, 0.0], [0.0] * TOKENS])
    options = {"norm_adv_by_std_in_grpo": False}
    advantages, _ = compute_grpo_env_aware_advantage(rewards, torch.ones(2, TOKENS), ["a", "a"], **options)
    assert advantages[:, 0].tolist() == [0.5, -0.5]


@PROPERTY
@given(batches(), st.booleans())
def test_untrained_tokens_get_zero(batch, by_std):
    advantages = batch.advantages(norm_adv_by_std_in_grpo=by_std)
    assert not advantages[torch.tensor(batch.mask) == 0].any()


# Single cases


@pytest.mark.parametrize(
    ("rewards", "invalid", "by_std", "expected"),
    [
        pytest.param([1, 1, 0, 0], [1], False, [2 / 3, 0, -1 / 3, -1 / 3], id="RL#3467: the second row has no vote"),
        pytest.param([1, 1, 0, 0], [2], False, [1 / 3, 1 / 3, 0, -2 / 3], id="RL#3467, the third row"),
        pytest.param([1, 1, 0, 0], [1], True, [1.1547, 0, -0.57735, -0.57735], id="RL#3467, by the survivors' std"),
        pytest.param([1, 1, 0, 0], [1, 2, 3], True, [0, 0, 0, 0], id="verl#7581: a lone survivor gives no signal"),
        pytest.param([1, 1, 0, 0], [0, 1, 2, 3], True, [0, 0, 0, 0], id="no survivor"),
        pytest.param([1, 1, 0, 0], [2, 3], True, [0, 0, 0, 0], id="survivors are equal"),
        pytest.param([1, 1, 0, 0], [1, 3], True, [0.70711, 0, -0.70711, 0], id="two survivors"),
        pytest.param([1], [], True, [0], id="a group of one by design"),
    ],
)
def test_advantages_of_one_group(rewards, invalid, by_std, expected):
    flags = np.isin(np.arange(len(rewards)), invalid)
    advantages = scalars(rewards, env_invalid=flags, norm_adv_by_std_in_grpo=by_std)
    assert advantages == pytest.approx(expected, abs=1e-5)


def test_a_uid_per_rollout_gives_no_signal_and_the_metrics_show_it():
    # rLLM#776: four rollouts of one task under four uids have no baseline; verl would train on their raw rewards.
    assert scalars([1, 1, 0, 0], ["a", "b", "c", "d"]) == [0, 0, 0, 0]
    metrics = group_metrics(outcome([1, 1, 0, 0]), ["a", "b", "c", "d"])
    assert metrics["browser/groups"] == metrics["browser/groups_without_signal"] == 4


def test_the_row_with_the_highest_index_votes():
    rewards = [7, 1, 7, 0]
    flags = {"rollout_id": ["x", "x", "y", "y"], "row_index": [2, 11, 4, 5], "norm_adv_by_std_in_grpo": False}
    assert scalars(rewards, **flags) == [0.5, 0.5, -0.5, -0.5]


def test_one_flagged_row_flags_its_rollout():
    flags = {"rollout_id": ["x", "x", "y", "z"], "row_index": [0, 1, 0, 0], "norm_adv_by_std_in_grpo": False}
    assert scalars([9, 9, 1, 0], env_invalid=[True, False, False, False], **flags) == [0, 0, 0.5, -0.5]


def test_a_rollout_that_trains_no_token_votes():
    mask = torch.tensor([[0] * TOKENS, [1] * TOKENS])
    options = {"norm_adv_by_std_in_grpo": False}
    advantages, _ = compute_grpo_env_aware_advantage(outcome([0, 1]), mask, ["a", "a"], **options)
    assert advantages.tolist() == [[0] * TOKENS, [0.5] * TOKENS]


def test_the_vote_of_a_last_row_without_trained_tokens_reaches_the_earlier_rows():
    mask = torch.tensor([[1] * TOKENS, [0] * TOKENS, [1] * TOKENS])
    flags = {"rollout_id": ["x", "x", "y"], "row_index": [0, 1, 0], "norm_adv_by_std_in_grpo": False}
    advantages, _ = compute_grpo_env_aware_advantage(outcome([0, 1, 0]), mask, ["a"] * 3, **flags)
    assert advantages[:, 0].tolist() == [0.5, 0, -0.5]


def test_a_padding_row_that_copies_a_rollouts_ids_takes_no_part():
    # verl's padding rows have a uid of their own and the other fields of a real row.
    flags = {"rollout_id": ["x", "y", "x"], "row_index": [0, 0, 0], "norm_adv_by_std_in_grpo": False}
    for invalid in ([False, False, True], [False, False, False]):
        assert scalars([1, 0, 50], ["a", "a", "pad-1"], env_invalid=invalid, **flags) == [0.5, -0.5, 0]


def test_rollout_ids_may_repeat_in_another_group():
    flags = {"rollout_id": [0, 1, 0, 1, 0], "row_index": [0, 0, 0, 0, 1], "norm_adv_by_std_in_grpo": False}
    assert scalars([1, 0, 9, 0, 8], ["a", "a", "b", "b", "b"], **flags) == [0.5, -0.5, 4, -4, 4]


def test_an_empty_batch_gives_empty_advantages():
    assert Batch([], [], [], [], [], []).advantages().shape == (0, TOKENS)
    assert group_metrics(torch.zeros(0, TOKENS), []) == {
        "browser/groups": 0,
        "browser/groups_without_signal": 0,
        "browser/batch_rollouts_valid": 0,
        "browser/batch_rollouts_invalid": 0,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_advantages_are_float32_for_any_dtype(dtype, mask_dtype):
    rewards, mask = outcome([1, 0]).to(dtype), torch.ones(2, TOKENS).to(mask_dtype)
    advantages, _ = compute_grpo_env_aware_advantage(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=False)
    assert advantages.dtype == torch.float32
    assert advantages[:, 0].tolist() == [0.5, -0.5]


def test_its_inputs_stay_as_they_were():
    rewards, mask = outcome([1, 0, 5]), torch.ones(3, TOKENS)
    flags, uid = np.array([False, False, True]), np.array(["a"] * 3, dtype=object)
    compute_grpo_env_aware_advantage(rewards, mask, uid, env_invalid=flags)
    assert torch.equal(rewards, outcome([1, 0, 5])) and mask.all()
    assert flags.tolist() == [False, False, True] and uid.tolist() == ["a"] * 3


# Rewards that are no numbers


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_vote_that_is_no_number_is_refused_and_named(reward):
    with pytest.raises(ValueError, match=r"row 1 \(uid 'b'\) sums to (nan|-?inf)"):
        scalars([0, reward, 1, 0], ["a", "b", "a", "b"])
    with pytest.raises(ValueError, match="row 1"):
        group_metrics(outcome([0, reward]), ["a", "a"])


def test_a_sum_beyond_float32_is_refused():
    with pytest.raises(ValueError, match="row 0 .* sums to inf"):
        compute_grpo_env_aware_advantage(torch.full((2, TOKENS), 3e38), torch.ones(2, TOKENS), ["a", "a"])


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_ignored_where_it_has_no_vote(reward):
    flags = {"rollout_id": ["x", "y", "z", "z"], "row_index": [0, 0, 0, 1], "norm_adv_by_std_in_grpo": False}
    advantages = scalars([reward, 1, reward, 0], env_invalid=[True, False, False, False], **flags)
    assert advantages == [0, 0.5, -0.5, -0.5]


# Arguments that can't be right


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_flags_may_be_zeros_and_ones(kind):
    expected = scalars([9, 1, 0], env_invalid=[True, False, False])
    assert scalars([9, 1, 0], env_invalid=kind([1, 0, 0])) == expected
    assert scalars([9, 1, 0], env_invalid=kind([True, False, False])) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"index": ["a"] * 3}, "index has 3 entries, token_level_rewards has 4 rows", id="index"),
        pytest.param({"env_invalid": [True]}, "env_invalid has 1 entries, .* 4 rows", id="flags"),
        pytest.param({"env_invalid": np.zeros(5, bool)}, "env_invalid has 5 entries, .* 4 rows", id="flag array"),
        pytest.param({"rollout_id": ["x"] * 5}, "rollout_id has 5 entries, .* 4 rows", id="rollout ids"),
        pytest.param({"row_index": np.zeros(2, int)}, "row_index has 2 entries, .* 4 rows", id="row indices"),
        pytest.param(
            {"response_mask": torch.ones(4, 7)}, r"response_mask has shape \(4, 7\), .* has \(4, 4\)", id="mask"
        ),
        pytest.param(
            {"token_level_rewards": torch.ones(4), "response_mask": torch.ones(4)}, r"shape \(4,\)", id="1-D rewards"
        ),
        pytest.param({"env_invalid": ["False"] * 4}, "env_invalid is 'False' in row 0", id="flags as text"),
        pytest.param({"env_invalid": [0, 2, 0, 0]}, "env_invalid is 2 in row 1", id="flag 2"),
        pytest.param({"env_invalid": [True, True, None, True]}, "env_invalid is None in row 2", id="flag missing"),
        pytest.param({"rollout_id": ["x", None, "y", "z"]}, "rollout_id is None in row 1", id="rollout id missing"),
        pytest.param({"index": ["a", "a", None, "a"]}, "index is None in row 2", id="uid missing"),
        pytest.param({"rollout_id": list("xxyz"), "row_index": [0, 1.5, 0, 0]}, "row_index is 1.5", id="row index 1.5"),
        pytest.param({"rollout_id": list("xyzy")}, r"rows \[1, 3\] .* row_index is missing", id="no row_index"),
        pytest.param(
            {"rollout_id": list("xyzy"), "row_index": [0, 1, 0, 1]},
            r"rows \[1, 3\] .* row_index is 1 in each",
            id="row index twice",
        ),
        pytest.param({"row_index": [0, 1, 0, 0]}, "row_index is 1 in row 1.* no rollout_id", id="no rollout_id"),
        pytest.param({"min_valid": 0}, "min_valid is 0; it must be at least 1", id="min_valid"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message):
    arguments = {"token_level_rewards": outcome([1, 0, 1, 0]), "response_mask": torch.ones(4, TOKENS)}
    with pytest.raises(ValueError, match=message):
        compute_grpo_env_aware_advantage(**{**arguments, "index": ["a"] * 4, **change})


def test_a_flagged_rollout_needs_no_voting_row():
    flags = {"rollout_id": ["x", "y", "z", "z"], "norm_adv_by_std_in_grpo": False}
    assert scalars([1, 0, 5, 6], env_invalid=[False, False, False, True], **flags) == [0.5, -0.5, 0, 0]


# Under verl


@pytest.fixture
def registry(monkeypatch):
    """verl's registry of estimators, put back after the test."""
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    core_algos.ADV_ESTIMATOR_REGISTRY.pop(ESTIMATOR_NAME, None)
    return core_algos.ADV_ESTIMATOR_REGISTRY


def test_registering_twice_is_registering_once(registry):
    register_with_verl()
    register_with_verl()
    assert core_algos.get_adv_estimator_fn("grpo_env_aware") is compute_grpo_env_aware_advantage


def test_another_estimator_of_that_name_is_not_replaced(registry):
    registry[ESTIMATOR_NAME] = lambda **kwargs: None
    with pytest.raises(ValueError, match="already been registered"):
        register_with_verl()


@pytest.mark.parametrize(("by_std", "expected"), [(True, 0.70711), (False, 0.5)])
def test_verl_calls_it_and_its_algorithm_settings_count(verl_v1, registry, by_std, expected):
    register_with_verl()
    data = DataProto.from_dict(
        tensors={"token_level_rewards": outcome([1, 0]), "response_mask": torch.ones(2, TOKENS)},
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    config = AlgoConfig(norm_adv_by_std_in_grpo=by_std, adv_estimator=ESTIMATOR_NAME)
    # As the trainer does: the setting is an argument of compute_advantage, which hands on only `config`.
    result = verl_v1.compute_advantage(data, ESTIMATOR_NAME, norm_adv_by_std_in_grpo=by_std, config=config)
    assert result.batch["advantages"][:, 0].tolist() == pytest.approx([expected, -expected], abs=1e-5)


@pytest.mark.parametrize(("argument", "setting"), [(False, True), (True, False)])
def test_either_switch_turns_the_division_by_std_off(argument, setting):
    config = {"norm_adv_by_std_in_grpo": setting}
    assert scalars([1, 0], norm_adv_by_std_in_grpo=argument, config=config) == [0.5, -0.5]


COLUMNS = {
    "env_invalid": [False, False, False, True],
    "rollout_id": ["x", "x", "y", "z"],
    "row_index": [0, 1, 0, 0],
}
FLAGGED = [0.5, 0.5, -0.5, 0]


def columns(**lists) -> dict:
    return {name: np.array(values, dtype=object) for name, values in lists.items()}


@pytest.mark.parametrize(
    "non_tensor_batch",
    [
        columns(**COLUMNS),
        columns(env_invalid=COLUMNS["env_invalid"], rollout_id=COLUMNS["rollout_id"], rollout_row=[0, 1, 0, 0]),
        columns(extra_fields=[dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]),
        columns(
            rollout_id=COLUMNS["rollout_id"],
            extra_fields=[{"env_invalid": row == 3, "rollout_row": int(row == 1)} for row in range(4)],
        ),
    ],
    ids=["columns", "columns as the loop names them", "extra_fields", "both"],
)
def test_flags_are_taken_from_the_batch(non_tensor_batch):
    options = {"non_tensor_batch": non_tensor_batch, "norm_adv_by_std_in_grpo": False}
    assert scalars([7, 1, 0, 9], **options) == FLAGGED


def test_explicit_flags_go_before_those_of_the_batch():
    options = {"non_tensor_batch": columns(**COLUMNS), "norm_adv_by_std_in_grpo": False}
    assert scalars([7, 1, 0, 9], env_invalid=[True, False, False, False], **options) == [0, 0, -4.5, 4.5]
    assert scalars([7, 1, 0, 9], row_index=[1, 0, 0, 0], **options) == [3.5, 3.5, -3.5, 0]
    assert scalars([7, 1, 0, 9], rollout_id=list("yxxz"), **options) == [3, -3, -3, 0]


def test_a_batch_without_flags_is_all_valid():
    options = {"non_tensor_batch": columns(extra_fields=[{}, {}]), "norm_adv_by_std_in_grpo": False}
    assert scalars([1, 0], **options) == [0.5, -0.5]


def test_a_flag_that_only_some_rows_have_is_refused():
    fields = [{"env_invalid": False}, {}, {"env_invalid": True}]
    with pytest.raises(ValueError, match="'env_invalid' is missing in row 1"):
        scalars([1, 0, 0], non_tensor_batch=columns(extra_fields=fields))


def test_a_later_row_in_the_batch_without_rollout_ids_is_refused():
    fields = [{"env_invalid": False, "rollout_row": 0}, {"env_invalid": False, "rollout_row": 1}]
    with pytest.raises(ValueError, match="no rollout_id"):
        scalars([1, 0], non_tensor_batch=columns(extra_fields=fields))


def test_it_loads_and_works_without_verl_and_ray():
    code = (
        "import sys\n"
        "sys.modules['verl'] = sys.modules['ray'] = None  # an import of either fails\n"
        "import torch\n"
        "from group_stats import compute_grpo_env_aware_advantage as compute\n"
        "rewards, mask = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)\n"
        "print(compute(rewards, mask, ['a', 'a'], norm_adv_by_std_in_grpo=False)[0].tolist())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout.strip()) == (0, "[[0.5], [-0.5]]"), result.stderr


# Metrics


def test_metrics_count_rollouts_and_groups():
    batch = Batch(
        rewards=[[0, 0, 0, reward] for reward in (9, 1, 0, 1, 1, 1, 0, 5, 5)],
        mask=[[1] * TOKENS] * 9,
        uid=["a", "a", "a", "b", "b", "c", "c", "d", "d"],
        rollout_id=["a0", "a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"],
        row_index=[0, 1, 0, 0, 0, 0, 0, 0, 0],
        env_invalid=[False] * 6 + [True] * 3,
    )
    assert group_metrics(torch.tensor(batch.rewards), batch.uid, **batch.flags) == {
        "browser/groups": 4,
        "browser/groups_without_signal": 3,  # b: equal rewards, c: one is valid, d: none is
        "browser/batch_rollouts_valid": 5,
        "browser/batch_rollouts_invalid": 3,
        "browser/reward_over_valid/mean": pytest.approx(4 / 5),
    }


@PROPERTY
@given(batches(), st.integers(1, 3))
def test_groups_without_signal_are_those_whose_advantages_are_all_zero(batch, min_valid):
    # Every row is trained, and rewards are whole numbers: no difference between them is rounded away.
    batch = dataclasses.replace(
        batch,
        mask=[[1] * TOKENS for _ in range(len(batch))],
        rewards=[[round(reward) for reward in row] for row in batch.rewards],
    )
    advantages = batch.advantages(min_valid=min_valid)
    speaking = {uid for uid, row in zip(batch.uid, advantages, strict=True) if row.any()}
    rewards = torch.tensor(batch.rewards, dtype=torch.float32)
    metrics = group_metrics(rewards, batch.uid, **batch.flags, min_valid=min_valid)
    assert metrics["browser/groups_without_signal"] == len(set(batch.uid)) - len(speaking)
    valid = len(set(batch.rollout_id) - flagged_rollouts(batch))
    assert metrics["browser/batch_rollouts_valid"] == valid
    assert ("browser/reward_over_valid/mean" in metrics) == (valid > 0)


def test_metrics_refuse_a_min_valid_of_zero():
    with pytest.raises(ValueError, match="min_valid is 0"):
        group_metrics(outcome([1, 0]), ["a", "a"], min_valid=0)
