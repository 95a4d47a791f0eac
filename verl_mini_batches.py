"""The patch of verl's V1 trainer that gives a batch its optimizer steps and mini-batches by mini_batches.py.

verl 0.9.1 takes a mini-batch to be ppo_mini_batch_size * n rows, so that the number of rows decides how many optimizer
steps a batch gets, how much padding they work through, and whether one of them learns from a single row. The patch
arranges the batches whose rows carry this recipe's flags, and leaves every other batch, and every trainer with a
critic, whose mini-batches are its own, to verl.

verl's functions run as they are, on a stand-in for the trainer that answers differently in one place each:
`_balance_batch` is told another number that the rows must divide by, `_update_actor` the size of the mini-batches.

With `actor.shuffle` verl deals the rows of a rank anew in each epoch: number and size of the steps hold then, what each
learns from is left to chance.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

from loss_aggregation import warning_of
from mini_batches import RowKind, arrange, configured_steps, optimizer_steps, padded_size
from patching import Patch
from row_flags import fetch_flags

logger = logging.getLogger(__name__)

V1 = "verl.trainer.ppo.v1.trainer_base"


@dataclass(frozen=True)
class _Arranged:
    """A batch on its way from `_balance_batch` to `_update_actor`."""

    keys: list[str]
    """TransferQueue keys of its rows, in the order that the mini-batches are cut from."""
    steps: int
    """Mini-batches in it."""


_ARRANGED = "_verl_browser_recipe_arranged"
"""Attribute of a trainer: the _Arranged of its batch, until the actor has been updated."""

_WARNED = "_verl_browser_recipe_loss_warned"
"""Attribute of a trainer that has looked at its loss aggregation."""


class _StandIn:
    """A trainer with some attributes replaced: all others are read from the trainer, and set on it."""

    def __init__(self, trainer: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _trainer=trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


def _wrap(module: ModuleType, functions: Sequence[Callable]) -> list[Callable]:
    """Return the V1 trainer's two functions for arranged batches: the first arranges one, the second says its size."""
    balance_batch, update_actor = functions

    @functools.wraps(balance_batch)
    def _balance_batch(self, batch, metrics, logging_prefix="global_seqlen", keep_minibatch=False):
        vars(self).pop(_ARRANGED, None)
        # Before the end of critic_warmup verl updates no actor, so that the batch has no mini-batches either.
        flags = None
        if not self.use_critic and self.config.trainer.critic_warmup <= self.global_steps:
            flags = fetch_flags(module.tq, batch)
        if flags is None:
            return balance_batch(self, batch, metrics, logging_prefix, keep_minibatch)
        flagged = dict(zip(batch.keys, flags, strict=True))
        steps = optimizer_steps(_configured_steps(self), flags.count(False))
        ranks = 0

        def get_required_batch_multiple(dp_size: int) -> int:
            nonlocal ranks
            ranks = dp_size
            return padded_size(1, steps, dp_size, _rank_multiple(self))

        stand_in = _StandIn(self, _get_required_batch_multiple=get_required_batch_multiple)
        batch = balance_batch(stand_in, batch, metrics, logging_prefix, keep_minibatch)
        metrics.update(_reorder(module, batch, flagged, steps, ranks, logging_prefix))
        metrics["browser/rows"] = float(len(flagged))
        metrics["browser/padding_rows"] = float(len(batch.keys) - len(flagged))
        metrics["browser/optimizer_steps"] = float(steps * self.config.actor_rollout_ref.actor.ppo_epochs)
        setattr(self, _ARRANGED, _Arranged(list(batch.keys), steps))
        _warn_of_loss_once(self)
        return batch

    @functools.wraps(update_actor)
    def _update_actor(self, batch, metrics):
        arranged = vars(self).pop(_ARRANGED, None)
        if arranged is None:
            return update_actor(self, batch, metrics)
        if list(batch.keys) != arranged.keys:
            raise RuntimeError(
                f"The rows of the batch changed between {V1}:PPOTrainer._balance_batch and _update_actor, so the "
                "mini-batches would not be those that were arranged. Something else replaces rows or reorders them: "
                "train without it"
            )
        config = _with_mini_batch_size(self.config, len(batch.keys) // arranged.steps)
        return update_actor(_StandIn(self, config=config), batch, metrics)

    return [_balance_batch, _update_actor]


def _configured_steps(trainer: Any) -> int:
    """Return the number of optimizer steps that the config asks for in one pass over a sampled batch."""
    prompts = trainer.config.data.train_batch_size // trainer.parameter_sync_step
    return configured_steps(prompts, trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size)


def _rank_multiple(trainer: Any) -> int:
    """Return what the rows of a rank must divide by: micro-batches of a fixed number of rows, 1 where tokens decide.

    verl's workers refuse rows that do not (verl/workers/engine/utils.py, prepare_micro_batches).
    """
    config = trainer.config.actor_rollout_ref
    sizes = []
    if not config.actor.get("use_dynamic_bsz", False):
        sizes.append(config.actor.get("ppo_micro_batch_size_per_gpu"))
    if not config.rollout.get("log_prob_use_dynamic_bsz", False):
        sizes.append(config.rollout.get("log_prob_micro_batch_size_per_gpu"))
    if trainer.use_reference_policy and not config.ref.get("log_prob_use_dynamic_bsz", False):
        sizes.append(config.ref.get("log_prob_micro_batch_size_per_gpu"))
    return math.lcm(*[size for size in sizes if size])  # without a size verl refuses the config itself


def _reorder(
    module: ModuleType, batch: Any, flagged: Mapping[str, bool], steps: int, ranks: int, prefix: str
) -> dict[str, float]:
    """Put the rows of a padded KVBatchMeta in the order of their mini-batches; return verl's metrics of the balance.

    - `flagged`: whether each row is flagged as invalid, by key, in the order in which they were sampled; without the
      padding.
    """
    import torch

    place = {key: row for row, key in enumerate(batch.keys)}
    keys = [*flagged, *(key for key in batch.keys if key not in flagged)]
    lengths = torch.tensor([batch.tags[place[key]]["seq_len"] for key in keys], dtype=torch.int64)
    workloads = module.calculate_workload(lengths).tolist()
    rows = _neighbours(keys)
    parts = arrange(
        [workloads[row] for row in rows],
        [_kind(flagged.get(keys[row])) for row in rows],
        steps,
        ranks,
        functools.partial(module.get_seqlen_balanced_partitions, equal_size=True),
    )
    partitions = [[rows[position] for position in part] for part in parts]
    batch.reorder([place[keys[row]] for row in chain.from_iterable(partitions)])
    return module.log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=partitions, prefix=prefix)


def _kind(flag: bool | None) -> RowKind:
    if flag is None:
        return RowKind.PADDING
    return RowKind.FLAGGED if flag else RowKind.TRAINS


def _neighbours(keys: Sequence[str]) -> list[int]:
    """Return the positions of the keys such that groups are together and, within them, rollouts; otherwise as given.

    TransferQueue has the rows in the order in which rollouts ended, those of several groups mixed.
    """
    groups, rollouts = ([key.rsplit("_", parts)[0] for key in keys] for parts in (2, 1))
    first_of_group, first_of_rollout = {}, {}
    for row, (group, rollout) in enumerate(zip(groups, rollouts, strict=True)):
        first_of_group.setdefault(group, row)
        first_of_rollout.setdefault(rollout, row)
    return sorted(range(len(keys)), key=lambda row: (first_of_group[groups[row]], first_of_rollout[rollouts[row]]))


def _with_mini_batch_size(config: Any, rows: int) -> Any:
    """Return a copy of a trainer's config in which `ppo_mini_batch_size * n`, as verl multiplies, is so many rows."""
    from omegaconf import OmegaConf

    config = copy.deepcopy(config)
    OmegaConf.set_readonly(config, False)
    config.actor_rollout_ref.actor.ppo_mini_batch_size = rows
    config.actor_rollout_ref.rollout.n = 1
    return config


def _warn_of_loss_once(trainer: Any) -> None:
    """Warn, at the first arranged batch of a trainer, of a loss aggregation that sees how rollouts are split."""
    if _WARNED in vars(trainer):
        return
    setattr(trainer, _WARNED, True)
    warning = warning_of(trainer.config.actor_rollout_ref.actor.loss_agg_mode, trainer.config.get("browser"))
    if warning is not None:
        logger.warning("%s", warning)


PATCH = Patch(
    V1,
    {"PPOTrainer._balance_batch": "f9b6e887d7504a65", "PPOTrainer._update_actor": "d7009bd8a69d40b9"},
    _wrap,
    # No trial: a verl that needs no patch may cut mini-batches anywhere from here to its workers, and two methods of a
    # trainer without workers can't show it. Another release is refused until someone has looked.
)
