"""verl's own trainer over a stand-in for TransferQueue: what a step writes, without Ray, engines or a model."""

import functools
import inspect
import warnings
from types import SimpleNamespace

import patches
import patching
import verl_patches

LEGACY = "verl.trainer.ppo.ray_trainer:compute_advantage"
V1_OUTER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage"
V1_INNER = "verl.trainer.ppo.v1.trainer_base:compute_advantage_for_multi_trajectories"
V1_VALIDATION = "verl.trainer.ppo.v1.trainer_base:PPOTrainer._val_metrics_update"
V1_BALANCE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer._balance_batch"
V1_UPDATE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer._update_actor"

LOOP_FIELDS = {"failure_kind": "", "rollout_row": 0, "rollout_rows": 1, "attempts": 1}
"""What the agent loop writes into `extra_fields` of each row, beside `env_invalid`."""


@functools.cache
def patched_verl() -> SimpleNamespace:
    """Return verl's modules, patched, and verl's own functions by target as `stock`. Takes some 20 s of CPU, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        import verl
        from verl.trainer.ppo import core_algos, padding_utils, ray_trainer
        from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
        from verl.trainer.ppo.v1 import utils as v1_utils
    patches.install()
    found = SimpleNamespace(
        package=verl,
        core_algos=core_algos,
        padding_utils=padding_utils,
        ray_trainer=ray_trainer,
        trainer_base=trainer_base,
        v1_utils=v1_utils,
        PPOTrainerSync=PPOTrainerSync,
        modules={module.__name__: module for module in (ray_trainer, trainer_base)},
    )
    targets = [target for patch in verl_patches.PATCHES for target in patch.targets]
    found.stock = {target: inspect.unwrap(read(found.modules, target)) for target in targets}
    return found


def read(modules: dict, target: str):
    """Return what a target names, None if it is missing."""
    module, _, name = target.partition(":")
    owner, last = patching._owner(modules[module], name)
    return getattr(owner, last, None)


class Queue:
    """TransferQueue's calls over a dict of rows."""

    def __init__(self, rows: dict[str, dict]):
        self.rows = rows
        self.calls: list[tuple] = []
        self.written: dict[str, dict[str, list]] = {}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        from tensordict import TensorDict

        self.calls.append(("get", tuple(keys), partition_id, tuple(select_fields or ())))
        known = self.rows[keys[0]]
        names = [name for name in select_fields or known if name in known]
        columns = {name: self.column([self.rows[key][name] for key in keys]) for name in names}
        return TensorDict(columns, batch_size=len(keys) if columns else 0)

    def kv_batch_put(self, keys, partition_id, fields, tags=None):
        from transfer_queue import KVBatchMeta

        names = sorted(fields.keys())
        self.calls.append(("put", tuple(keys), partition_id, tuple(names)))
        for name in names:
            for key, value in zip(keys, fields[name], strict=True):
                self.rows.setdefault(key, {})[name] = value
                self.written.setdefault(key, {})[name] = value.tolist() if hasattr(value, "tolist") else value
        return KVBatchMeta(keys=list(keys), tags=tags or [{} for _ in keys], partition_id=partition_id)

    @staticmethod
    def column(values: list):
        import torch
        from tensordict.tensorclass import NonTensorStack

        if isinstance(values[0], torch.Tensor):
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return NonTensorStack(*values)


def row(uid: str, reward: float, mask=(1, 1), **fields) -> dict:
    import torch

    scores = torch.zeros(len(mask))
    scores[-1] = reward
    logs = -torch.arange(1.0, len(mask) + 1)
    return {
        "uid": uid,
        "response_mask": torch.tensor(mask),
        "rm_scores": scores,
        "rollout_log_probs": logs,
        "old_log_probs": logs * 1.5,
        "ref_log_prob": logs * 2,
        "position_ids": torch.arange(3),
        "extra_fields": fields,
    }


def valid(uid: str, reward: float, mask=(1, 1)) -> dict:
    return row(uid, reward, mask, env_invalid=False, **LOOP_FIELDS)


def flagged(uid: str, reward: float = 0.0) -> dict:
    return row(uid, reward, (0,), env_invalid=True, **LOOP_FIELDS | {"failure_kind": "seed_failed"})


class Trainer:
    """verl's synchronous V1 trainer over a stand-in queue, without what its constructor builds."""

    def __init__(self, verl, monkeypatch, rows: dict[str, dict], tags: list[dict] | None = None, **algorithm):
        from omegaconf import OmegaConf

        self.verl, self.queue = verl, Queue(rows)
        for module in (verl.trainer_base, verl.padding_utils):
            queue = SimpleNamespace(kv_batch_get=self.queue.kv_batch_get, kv_batch_put=self.queue.kv_batch_put)
            monkeypatch.setattr(module, "tq", queue)
        defaults = {"adv_estimator": "grpo", "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0, "kl_penalty": "kl"}
        self.trainer = object.__new__(verl.PPOTrainerSync)
        config = {"algorithm": defaults | algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}}
        self.trainer.config = OmegaConf.create(config)
        self.trainer.kl_ctrl_in_reward = verl.core_algos.FixedKLController(0.1)
        self.batch = verl.trainer_base.KVBatchMeta(
            keys=list(rows), tags=tags or [{} for _ in rows], partition_id="train"
        )
        self.metrics: dict = {}

    def run(self, stock: bool = False) -> dict[str, dict[str, list]]:
        """Return what the trainer wrote, by key and field."""
        if stock:
            self.trainer._compute_advantage = self.verl.stock[V1_OUTER].__get__(self.trainer)
        self.trainer._compute_advantage(self.batch, self.metrics)
        return self.queue.written
