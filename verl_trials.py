"""Trials of a verl that is not the pinned one: does it keep flagged rollouts out of `grpo_env_aware` by itself?

Each trial runs verl's own code on a group of two valid rollouts and a flagged one. They judge the advantages that come
out, not the way in which the flags travel, so they need no knowledge of how a release does it.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

REWARDS = [1.0, 0.0, 0.0]
INVALID = [False, False, True]
WANTED = [0.5, -0.5, 0.0]
"""Advantages without division by std; if the flagged rollout voted, the first would be 2/3."""


def legacy_is_right(module: ModuleType) -> bool:
    """Return whether `compute_advantage` of the legacy trainer keeps a flagged rollout out."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    data = DataProto(
        batch=TensorDict(
            {
                "token_level_rewards": torch.tensor(REWARDS).unsqueeze(-1),
                "response_mask": torch.ones(len(REWARDS), 1, dtype=torch.int64),
            },
            batch_size=len(REWARDS),
        ),
        non_tensor_batch={
            "uid": np.array(["g"] * len(REWARDS), dtype=object),
            "env_invalid": np.array(INVALID, dtype=object),
        },
    )
    data = module.compute_advantage(
        data, adv_estimator="grpo_env_aware", norm_adv_by_std_in_grpo=False, config=_algorithm()
    )
    return torch.allclose(data.batch["advantages"].squeeze(-1), torch.tensor(WANTED))


def v1_is_right(module: ModuleType) -> bool:
    """Return whether the V1 trainer keeps a flagged rollout out, and lets one of two rows vote for its rollout."""
    import torch
    from omegaconf import OmegaConf

    keys = ["g_0_0", "g_0_1", "g_1_0", "g_2_0"]
    rollouts = [0, 0, 1, 2]
    stored = _v1_rows(keys, rollouts)
    written = {}

    def kv_batch_get(keys, partition_id, select_fields):
        return stored.select(*[name for name in select_fields if name in stored.keys()])

    def kv_batch_put(keys, partition_id, fields):
        written.update({name: fields[name] for name in fields.keys()})
        return batch

    config = {"algorithm": _algorithm(), "actor_rollout_ref": {"rollout": {"n": len(REWARDS)}}}
    trainer = SimpleNamespace(config=OmegaConf.create(config))
    batch = module.KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
    queue = module.tq
    module.tq = SimpleNamespace(kv_batch_get=kv_batch_get, kv_batch_put=kv_batch_put)
    try:
        module.PPOTrainer._compute_advantage(trainer, batch, {})
    finally:
        module.tq = queue
    got = torch.cat([row for row in written["advantages"].unbind()])
    return torch.allclose(got, torch.tensor([WANTED[rollout] for rollout in rollouts]))


def _algorithm():
    """Return the settings that the trials run under."""
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "adv_estimator": "grpo_env_aware",
            "norm_adv_by_std_in_grpo": False,
            "use_kl_in_reward": False,
            "gamma": 1.0,
            "lam": 1.0,
        }
    )


def _v1_rows(keys: list[str], rollouts: list[int]):
    """Return the rows of the trial as TransferQueue keeps them, with the flags that the agent loop writes."""
    import torch
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    def jagged(values):
        return torch.nested.as_nested_tensor([torch.tensor([value]) for value in values], layout=torch.jagged)

    extra_fields = [
        {
            "env_invalid": INVALID[rollout],
            "failure_kind": "seed_failed" if INVALID[rollout] else "",
            "rollout_row": int(key.rpartition("_")[2]),
            "rollout_rows": rollouts.count(rollout),
            "attempts": 1,
        }
        for key, rollout in zip(keys, rollouts, strict=True)
    ]
    return TensorDict(
        {
            "uid": NonTensorStack(*["g"] * len(keys)),
            "response_mask": jagged([1] * len(keys)),
            "rm_scores": jagged([REWARDS[rollout] for rollout in rollouts]),
            "extra_fields": NonTensorStack(*extra_fields),
        },
        batch_size=len(keys),
    )
