"""GRPO advantages from the valid rollouts of a group, and the metrics of a batch's groups.

A rollout that the environment spoiled is no evidence about the policy: it must neither be trained on nor shift the
baseline of its group. verl's GRPO gives it a vote even if its loss is masked, counts a rollout that was split into
rows once per row under every registered estimator, and hands a group's only member its raw reward.

Nothing here depends on the order of the rows: a group's rewards are added in ascending order, in float64, so that the
same rollouts in any order give the same advantages bit for bit.

Source: verl 0.9.1, verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage; GRPO is arXiv 2402.03300, the form
without std arXiv 2503.20783.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ESTIMATOR_NAME = "grpo_env_aware"

# What our rows call the flags: the argument's own name, then the name that the agent loop writes into `extra_fields`.
_FIELD_NAMES = {
    "env_invalid": ("env_invalid",),
    "rollout_id": ("rollout_id",),
    "row_index": ("row_index", "rollout_row"),
}


@dataclass(frozen=True)
class _Votes:
    """The rollouts of a batch and the reward with which each valid one votes in its group."""

    rollout_of_row: np.ndarray
    """int64 (rows,), from 0."""
    rollouts: int
    groups: int
    rollout: np.ndarray
    """int64 (votes,): the rollout that votes. Votes are in ascending order of reward."""
    group: np.ndarray
    """int64 (votes,), from 0."""
    reward: np.ndarray
    """float64 (votes,): exact float32 values, in ascending order."""
    votes_in_group: np.ndarray
    """int64 (groups,)."""


def compute_grpo_env_aware_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable] | np.ndarray,
    *,
    env_invalid: Sequence[bool] | np.ndarray | None = None,
    rollout_id: Sequence[Hashable] | np.ndarray | None = None,
    row_index: Sequence[int] | np.ndarray | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    min_valid: int = 2,
    epsilon: float = 1e-6,
    config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), the same float32 tensor (rows, response_length); 0 where response_mask is 0.

    Each valid rollout votes once, with the summed rewards of its row with the highest `row_index`, and gets
    `reward - mean`, over `std + epsilon` if normalised, on the trained tokens of all its rows. A rollout with any
    flagged row is flagged as a whole: no vote, and exactly 0. A group with fewer than `min_valid` votes gives 0, for a
    lone reward has nothing to be compared with. Whether a rollout is valid is never read from `response_mask`: a policy
    that stops at once trains no token and is still a measured reward.

    - `index`: the group (uid) of each row. `env_invalid`: flagged rows; None: none. A padding row is passed as flagged.
    - `rollout_id`: the rollout of each row, unique within its group; None: each row is a rollout of its own.
    - `row_index`: the row's place in its rollout; needed if a rollout has several rows.
    - `config`: verl's `algorithm`. A registered estimator gets its settings only there, so either
      `norm_adv_by_std_in_grpo` being false turns the division off.
    - `kwargs`: what verl gives to every estimator. Of `non_tensor_batch` (columns, or `extra_fields` with a dict a row)
      the flags are taken whose argument is None.

    Raises ValueError for shapes that differ, flags that can't be read, a rollout whose voting row is not known, and a
    reward that is not finite in a row that votes.
    """
    if response_mask.shape != token_level_rewards.shape:
        shapes = f"{tuple(response_mask.shape)}, token_level_rewards has {tuple(token_level_rewards.shape)}"
        raise ValueError(f"response_mask has shape {shapes}; both must be (rows, response_length)")
    columns = kwargs.get("non_tensor_batch")
    if columns is not None:
        rows = len(token_level_rewards)
        env_invalid = _column("env_invalid", columns, rows) if env_invalid is None else env_invalid
        rollout_id = _column("rollout_id", columns, rows) if rollout_id is None else rollout_id
        row_index = _column("row_index", columns, rows) if row_index is None else row_index
    votes = _count_votes(token_level_rewards, index, env_invalid, rollout_id, row_index)
    normalise = norm_adv_by_std_in_grpo and (config is None or bool(config.get("norm_adv_by_std_in_grpo", True)))

    of_rollout = np.zeros(votes.rollouts)
    of_rollout[votes.rollout] = _vote_advantages(votes, normalise, _checked_min_valid(min_valid), epsilon)
    of_row = torch.from_numpy(of_rollout.astype(np.float32)[votes.rollout_of_row]).to(response_mask.device)
    advantages = (of_row.unsqueeze(-1) * response_mask).float()
    return advantages, advantages


def group_metrics(
    token_level_rewards: torch.Tensor,
    index: Sequence[Hashable] | np.ndarray,
    *,
    env_invalid: Sequence[bool] | np.ndarray | None = None,
    rollout_id: Sequence[Hashable] | np.ndarray | None = None,
    row_index: Sequence[int] | np.ndarray | None = None,
    min_valid: int = 2,
) -> dict[str, float]:
    """Return the `browser/*` metrics of a batch, counted in groups and rollouts, never in rows.

    The arguments are those of the estimator, padding rows left out. A group is without signal if all its advantages
    are 0: fewer than `min_valid` valid rollouts, or the same reward for all of them. The mean reward is left out if no
    rollout is valid. Raises ValueError as the estimator does.
    """
    votes = _count_votes(token_level_rewards, index, env_invalid, rollout_id, row_index)
    lowest, highest = np.zeros(votes.groups), np.zeros(votes.groups)
    # Votes are in ascending order, and of several values for one place numpy keeps the last.
    highest[votes.group] = votes.reward
    lowest[votes.group[::-1]] = votes.reward[::-1]
    silent = (votes.votes_in_group < _checked_min_valid(min_valid)) | (lowest == highest)
    valid = len(votes.rollout)
    metrics = {
        "browser/groups": float(votes.groups),
        "browser/groups_without_signal": float(silent.sum()),
        "browser/batch_rollouts_valid": float(valid),
        "browser/batch_rollouts_invalid": float(votes.rollouts - valid),
    }
    if valid:
        metrics["browser/reward_over_valid/mean"] = math.fsum(votes.reward) / valid
    return metrics


def register_with_verl() -> None:
    """Make `algorithm.adv_estimator=grpo_env_aware` known to verl; doing it again changes nothing.

    Raises ValueError if something else is registered under that name.
    """
    from verl.trainer.ppo import core_algos

    core_algos.register_adv_est(ESTIMATOR_NAME)(compute_grpo_env_aware_advantage)


def _vote_advantages(votes: _Votes, normalise: bool, min_valid: int, epsilon: float) -> np.ndarray:
    """Return the advantage of each vote, float64 (votes,); 0 in a group with fewer than min_valid votes."""
    group, count = votes.group, votes.votes_in_group
    # bincount adds in the order given. Equal rewards of up to 2**29 rollouts have an exact mean, because a float32
    # value leaves 29 bits of a float64 free: a group of equals gives exactly 0.
    mean = np.bincount(group, weights=votes.reward, minlength=votes.groups) / np.maximum(count, 1)
    advantage = votes.reward - mean[group]
    if normalise:
        squares = np.bincount(group, weights=advantage * advantage, minlength=votes.groups)
        std = np.sqrt(squares / np.maximum(count - 1, 1))
        advantage /= std[group] + epsilon
    advantage[count[group] < min_valid] = 0.0
    return advantage


def _count_votes(
    token_level_rewards: torch.Tensor, index: Any, env_invalid: Any, rollout_id: Any, row_index: Any
) -> _Votes:
    """Return who votes with what. Raises ValueError: see compute_grpo_env_aware_advantage."""
    if token_level_rewards.dim() != 2:
        shape = tuple(token_level_rewards.shape)
        raise ValueError(f"token_level_rewards has shape {shape}; it must be (rows, response_length)")
    rows = len(token_level_rewards)
    group_of_row, groups = _numbered("index", index, rows)
    flagged = _bools(env_invalid, rows)
    places = None if row_index is None else _integers("row_index", row_index, rows)
    if rollout_id is None:
        if places is not None and places.any():
            row = int(np.flatnonzero(places)[0])
            raise ValueError(
                f"row_index is {places[row]} in row {row}, a later row of a rollout, but no rollout_id says of which: "
                "every row would vote. Pass rollout_id"
            )
        rollout_of_row, rollouts, voting_row = np.arange(rows), rows, np.arange(rows)
        invalid = flagged
    else:
        rollout_of_row, rollouts = _rollouts(rollout_id, group_of_row, groups, rows)
        invalid = np.zeros(rollouts, dtype=bool)
        invalid[rollout_of_row[flagged]] = True
        voting_row = _voting_rows(rollout_of_row, rollouts, places, invalid)

    rewards = _row_rewards(token_level_rewards)
    rollout = np.flatnonzero(~invalid)
    reward = rewards[voting_row[rollout]]
    if not np.isfinite(reward).all():
        row = int(voting_row[rollout[~np.isfinite(reward)][0]])
        raise ValueError(
            f"token_level_rewards: row {row} (uid {index[row]!r}) sums to {rewards[row]} and belongs to a valid "
            "rollout. Find what made this reward, or flag the rollout in env_invalid if it was not measured"
        )
    ascending = np.argsort(reward)
    rollout, reward = rollout[ascending], reward[ascending]
    group = group_of_row[voting_row[rollout]]
    counts = np.bincount(group, minlength=groups)
    return _Votes(rollout_of_row, rollouts, groups, rollout, group, reward, counts)


def _rollouts(rollout_id: Any, group_of_row: np.ndarray, groups: int, rows: int) -> tuple[np.ndarray, int]:
    """Return the number of each row's rollout, int64 (rows,), and how many there are.

    A rollout is a rollout_id within a group: verl's padding copies the fields of a real row under a uid of its own,
    and must not become a row of that rollout.
    """
    ids, count = _numbered("rollout_id", rollout_id, rows)
    if count == rows:
        return ids, count
    group_of_id = np.zeros(count, dtype=np.int64)
    group_of_id[ids] = group_of_row
    if (group_of_id[ids] == group_of_row).all():
        return ids, count
    pairs, numbers = np.unique(ids * groups + group_of_row, return_inverse=True)
    return numbers, len(pairs)


def _voting_rows(
    rollout_of_row: np.ndarray, rollouts: int, places: np.ndarray | None, invalid: np.ndarray
) -> np.ndarray:
    """Return each rollout's row with the highest place, int64 (rollouts,).

    Raises ValueError if a valid rollout has several such rows, for then its vote would depend on the rows' order.
    """
    rows = len(rollout_of_row)
    if places is None or rows == rollouts:
        last = np.arange(rows)
    else:
        highest = np.full(rollouts, places.min())
        np.maximum.at(highest, rollout_of_row, places)
        last = np.flatnonzero(places == highest[rollout_of_row])
    rivals = np.bincount(rollout_of_row[last], minlength=rollouts)
    if (rivals[~invalid] > 1).any():
        rollout = np.flatnonzero((rivals > 1) & ~invalid)[0]
        which = last[rollout_of_row[last] == rollout].tolist()
        reason = "row_index is missing" if places is None else f"row_index is {places[which[0]]} in each of them"
        raise ValueError(
            f"rows {which} are the same rollout and {reason}, so which one votes is not known. "
            "Pass row_index, different for each row of a rollout"
        )
    voting = np.zeros(rollouts, dtype=np.int64)
    voting[rollout_of_row[last]] = last
    return voting


def _row_rewards(token_level_rewards: torch.Tensor) -> np.ndarray:
    """Return the sum of each row, float64 (rows,), rounded to float32 as verl's scores are; may hold NaN and inf."""
    rewards = token_level_rewards.detach().cpu()
    if rewards.dtype != torch.float64:
        rewards = rewards.float()
    # numpy, because torch.sum wakes its thread pool from 32,768 elements on: up to 7 ms for 0.04 ms of work where
    # threads compete for cores. Contiguous, so that every row is added in the same order, wherever it stands.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.ascontiguousarray(rewards.numpy()).sum(axis=1, dtype=np.float64)
        return sums.astype(np.float32).astype(np.float64)


def _numbered(name: str, labels: Any, rows: int) -> tuple[np.ndarray, int]:
    """Return the number of each row's label in order of appearance, int64 (rows,), and how many labels there are.

    Through a dict: np.unique sorts the strings, 3/4 of the time of verl's grpo_vectorized from 8,192 rows on.
    """
    labels = _checked_list(name, labels, rows)
    distinct = dict.fromkeys(labels)
    if None in distinct:
        raise ValueError(f"{name} is None in row {labels.index(None)}; every row needs one")
    if len(distinct) == rows:
        return np.arange(rows), rows
    numbers = dict(zip(distinct, range(len(distinct)), strict=True))
    return np.fromiter(map(numbers.__getitem__, labels), dtype=np.int64, count=rows), len(distinct)


def _bools(env_invalid: Any, rows: int) -> np.ndarray:
    """Return env_invalid as bool (rows,); all False for None. Raises ValueError for anything but booleans, 0 and 1."""
    if env_invalid is None:
        return np.zeros(rows, dtype=bool)
    if isinstance(env_invalid, np.ndarray) and env_invalid.shape == (rows,) and env_invalid.dtype == bool:
        return env_invalid
    values = _checked_list("env_invalid", env_invalid, rows)
    # Not by truth: the text "False" is true, and a flag that is missing (None) is not False.
    wrong = next((row for row, value in enumerate(values) if isinstance(value, str) or value not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"env_invalid is {values[wrong]!r} in row {wrong}; it must be True or False")
    return np.array(values, dtype=bool)


def _integers(name: str, values: Any, rows: int) -> np.ndarray:
    """Return the values as int64 (rows,). Raises ValueError for anything but integers."""
    return _typed(name, values, rows, (int, np.integer)).astype(np.int64)


def _typed(name: str, values: Any, rows: int, wanted: tuple[type, type]) -> np.ndarray:
    """Return the values as (rows,). Raises ValueError for another length or a value that is of none of these types."""
    if isinstance(values, np.ndarray) and values.shape == (rows,) and issubclass(values.dtype.type, wanted[1]):
        return values
    values = _checked_list(name, values, rows)
    if not all(issubclass(kind, wanted) for kind in set(map(type, values))):
        row = next(row for row, value in enumerate(values) if not isinstance(value, wanted))
        raise ValueError(f"{name} is {values[row]!r} in row {row}; it must be of type {wanted[0].__name__}")
    return np.array(values)


def _checked_list(name: str, values: Any, rows: int) -> list:
    """Return the values, one a row, as a list. Raises ValueError for another length."""
    values = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else list(values)
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries, token_level_rewards has {rows} rows; pass one a row")
    return values


def _checked_min_valid(min_valid: int) -> int:
    """Return min_valid. Raises ValueError below 1."""
    if min_valid < 1:
        raise ValueError(f"min_valid is {min_valid}; it must be at least 1 (2: a reward needs another to compare with)")
    return min_valid


def _column(name: str, columns: Mapping[str, Any], rows: int) -> list | None:
    """Return what verl's non-tensor columns hold for an argument of the estimator; None if they hold nothing.

    Raises ValueError if only some rows have it: a row without the flag may be an invalid one.
    """
    for field in _FIELD_NAMES[name]:
        if field in columns:
            return columns[field]
    if "extra_fields" not in columns:
        return None
    extra_fields = _checked_list("extra_fields", columns["extra_fields"], rows)
    for field in _FIELD_NAMES[name]:
        missing = [row for row, fields in enumerate(extra_fields) if field not in fields]
        if not missing:
            return [fields[field] for fields in extra_fields]
        if len(missing) < rows:
            raise ValueError(
                f"extra_fields: {field!r} is missing in row {missing[0]} and {len(missing) - 1} others, present in the "
                "rest; every row of the batch needs it, so train with one agent loop per batch"
            )
    return None
