"""What the recipe replaces in verl, one function per patch; patches.py applies them when verl's modules are imported.

verl 0.9.1 computes advantages from uid, rewards and masks alone: `PPOTrainer._compute_advantage` fetches no
`extra_fields`, so a rollout that the environment broke votes in its group's baseline like a measured zero. The patches
bring the flags to group_stats for batches whose rows carry `env_invalid`, and leave every other batch to verl.

They can go once verl gives registered estimators `non_tensor_batch` with flags, rollout ids and row indices, in the V1
trainer too: verl_trials.py notices that, and they step aside. The patch of mini-batches is in verl_mini_batches.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import verl_mini_batches
import verl_trials
from patching import Patch, PatchRecord, PatchStatus, apply_patch, installed_version
from row_flags import checked_flags, fetch_flags

LEGACY = "verl.trainer.ppo.ray_trainer"
V1 = verl_mini_batches.V1

ESTIMATOR = "grpo_env_aware"
ESTIMATOR_TARGET = f"verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY[{ESTIMATOR!r}]"


def apply(module: ModuleType) -> tuple[PatchRecord, ...]:
    """Patch a module that has run; return a record for each patched name of it."""
    records = []
    if module.__name__ == LEGACY:
        import group_stats

        group_stats.register_with_verl()
        records.append(PatchRecord(ESTIMATOR_TARGET, installed_version(), PatchStatus.APPLIED))
    for patch in PATCHES:
        if patch.module == module.__name__:
            records += apply_patch(patch, module)
    return tuple(records)


def refuse_all(module_name: str, reason: str) -> list[PatchRecord]:
    """Return a refusal for each patched name of a module that could not be imported or patched."""
    targets = [ESTIMATOR_TARGET] if module_name == LEGACY else []
    targets += [target for patch in PATCHES if patch.module == module_name for target in patch.targets]
    return [PatchRecord(target, installed_version(), PatchStatus.REFUSED, reason) for target in targets]


# --- V1: PPOTrainer._compute_advantage, and the function that it calls for the advantages ---


@dataclass
class _Step:
    """One call of the V1 trainer's `_compute_advantage` for a batch that carries flags."""

    keys: list[str]
    """TransferQueue keys of the rows, `{uid}_{session_id}_{row}`."""
    flags: list[bool]
    """Whether each row is flagged as invalid."""
    real: list[int]
    """Positions of the rows that are not padding."""
    metrics: dict[str, Any]
    """The trainer's metrics of this step."""
    used: bool = False
    """Whether the advantages were computed from these flags."""


_step: ContextVar[_Step | None] = ContextVar("verl_browser_recipe_step", default=None)


def _wrap_v1(module: ModuleType, functions: Sequence[Callable]) -> list[Callable]:
    """Return the V1 trainer's two functions with the flags of the batch: the outer fetches them, the inner reads them.

    KL penalty, rollout correction and what goes back to TransferQueue stay verl's own code between the two.
    """
    compute_advantage, for_multi_trajectories = functions
    signature = inspect.signature(for_multi_trajectories)

    @functools.wraps(compute_advantage)
    def _compute_advantage(self, batch, metrics):
        flags = fetch_flags(module.tq, batch)
        if flags is None:
            return compute_advantage(self, batch, metrics)
        real = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        if not _keeps_flagged_out(self.config.algorithm.adv_estimator, (flags[row] for row in real)):
            return compute_advantage(self, batch, metrics)
        step = _Step(list(batch.keys), flags, real, metrics)
        token = _step.set(step)
        try:
            result = compute_advantage(self, batch, metrics)
        finally:
            _step.reset(token)
        if not step.used:
            raise RuntimeError(
                f"{V1}:PPOTrainer._compute_advantage did not call its module's compute_advantage_for_multi_trajectories"
                ", so invalid rollouts voted. Something replaced one of the two: run `python patches.py --check`, and "
                "train without the other patch"
            )
        return result

    @functools.wraps(for_multi_trajectories)
    def compute_advantage_for_multi_trajectories(*args, **kwargs):
        step = _step.get()
        if step is None:
            return for_multi_trajectories(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        step.used = True
        return _advantages_of_step(step, **call.arguments)

    return [_compute_advantage, compute_advantage_for_multi_trajectories]


def _advantages_of_step(step: _Step, data, batch_keys, norm_adv_by_std_in_grpo, config, **_):
    """Return `data`, a DataProto, with advantages and returns from group_stats: float32 (rows, response_length).

    Padding rows take no part and get 0. The metrics are of the scores, so that a KL penalty in the rewards neither
    moves the mean reward nor makes a group of equal scores look like one with a signal.
    """
    import numpy as np
    import torch

    import group_stats

    if list(batch_keys) != step.keys:
        raise RuntimeError("verl reordered the batch while it computed advantages, so flags and rows no longer match")
    uids, rollout_ids, row_indices = zip(*(_split_key(step.keys[row]) for row in step.real), strict=True)
    rollouts = {
        "index": np.array(uids, dtype=object),
        "env_invalid": np.array([step.flags[row] for row in step.real], dtype=bool),
        "rollout_id": np.array(rollout_ids, dtype=object),
        "row_index": np.array(row_indices),
    }
    rows = torch.tensor(step.real)
    real_advantages, _returns = group_stats.compute_grpo_env_aware_advantage(
        data.batch["token_level_rewards"][rows],
        data.batch["response_mask"][rows],
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
        **rollouts,
    )
    advantages = torch.zeros(data.batch["response_mask"].shape, dtype=torch.float32)
    advantages[rows] = real_advantages
    data.batch["advantages"] = advantages
    data.batch["returns"] = advantages
    step.metrics.update(group_stats.group_metrics(data.batch["token_level_scores"][rows], **rollouts))
    return data


def _split_key(key: str) -> tuple[str, str, int]:
    """Return uid, rollout id and row index of a TransferQueue key. Raises RuntimeError for another format."""
    rollout_id, _, row = key.rpartition("_")
    uid = rollout_id.rpartition("_")[0]
    if not (uid and row.isdecimal()):
        raise RuntimeError(f"TransferQueue key {key!r} is not {{uid}}_{{session_id}}_{{row}}, as verl 0.9.1 writes it")
    return uid, rollout_id, int(row)


def _keeps_flagged_out(estimator: Any, flags: Iterable[bool], estimators: Sequence[str] = ("grpo", ESTIMATOR)) -> bool:
    """Return whether flagged rollouts have no vote. Raises RuntimeError if they have, and there are some."""
    name = getattr(estimator, "value", estimator)
    if name in estimators:
        return True
    if any(flags):
        raise RuntimeError(
            f"algorithm.adv_estimator={name} would learn from the rollouts that the environment broke, as if their "
            f"reward 0 had been measured. Set algorithm.adv_estimator to {' or '.join(estimators)}, or leave such "
            "rollouts out of the batch with NEMO_GYM_BROWSER_DROP_INVALID=1"
        )
    return False


# --- V1: validation ---


def _wrap_validation(module: ModuleType, functions: Sequence[Callable]) -> list[Callable]:
    """Return `_val_metrics_update` with what the replay buffer kept about the rollouts of the validation."""
    (update,) = functions

    @functools.wraps(update)
    def _val_metrics_update(self, *args, **kwargs):
        metrics = update(self, *args, **kwargs)
        pop = getattr(self.replay_buffer, "pop_validation_metrics", None)
        return metrics if pop is None else metrics | pop()

    return [_val_metrics_update]


# --- The legacy trainer, and the trainers of verl.experimental that stand on it ---


def _wrap_legacy(module: ModuleType, functions: Sequence[Callable]) -> list[Callable]:
    """Return `compute_advantage` with the flags of the batch. Here a rollout is one row, and there are no metrics."""
    (compute_advantage,) = functions
    signature = inspect.signature(compute_advantage)

    @functools.wraps(compute_advantage)
    def with_flags(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        data = call.arguments["data"]
        flags = _legacy_flags(data.non_tensor_batch)
        if flags is None or not _keeps_flagged_out(call.arguments["adv_estimator"], flags):
            return compute_advantage(*args, **kwargs)
        import group_stats

        if "response_mask" not in data.batch.keys():
            data.batch["response_mask"] = module.compute_response_mask(data)
        data.batch["advantages"], data.batch["returns"] = group_stats.compute_grpo_env_aware_advantage(
            data.batch["token_level_rewards"],
            data.batch["response_mask"],
            data.non_tensor_batch["uid"],
            env_invalid=flags,
            norm_adv_by_std_in_grpo=call.arguments["norm_adv_by_std_in_grpo"],
            config=call.arguments["config"],
        )
        return data

    return [with_flags]


def _guard_legacy(module: ModuleType, functions: Sequence[Callable]) -> list[Callable]:
    """Return `compute_advantage` of a verl that needs no patch, refusing flagged rollouts to all other estimators.

    Such a verl brings flags to registered estimators only: `grpo`, which the patch serves, would let them vote.
    """
    (compute_advantage,) = functions
    signature = inspect.signature(compute_advantage)

    @functools.wraps(compute_advantage)
    def guarded(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        flags = _legacy_flags(call.arguments["data"].non_tensor_batch)
        if flags is not None:
            _keeps_flagged_out(call.arguments["adv_estimator"], flags, estimators=(ESTIMATOR,))
        return compute_advantage(*args, **kwargs)

    return [guarded]


def _legacy_flags(columns: Any) -> list[bool] | None:
    """Return whether each row is flagged as invalid; None if no row carries the flag.

    The legacy agent loops make a column of each key of `extra_fields`, with None where a row has no such key.
    """
    if "env_invalid" in columns:
        values = columns["env_invalid"]
    elif "extra_fields" in columns:
        values = [row.get("env_invalid") if isinstance(row, dict) else None for row in columns["extra_fields"]]
    else:
        return None
    return checked_flags(values, groups=columns["uid"], names=range(len(values)))


PATCHES = (
    Patch(
        LEGACY,
        {"compute_advantage": "314695381c755264"},
        _wrap_legacy,
        is_right=verl_trials.legacy_is_right,
        guard=_guard_legacy,
    ),
    Patch(
        V1,
        {
            "PPOTrainer._compute_advantage": "2a4a2aa4a475b228",
            "compute_advantage_for_multi_trajectories": "d973cc8aec79bc3d",
        },
        _wrap_v1,
        is_right=verl_trials.v1_is_right,
    ),
    Patch(V1, {"PPOTrainer._val_metrics_update": "8cecd418b5011bfc"}, _wrap_validation),
    verl_mini_batches.PATCH,
)
