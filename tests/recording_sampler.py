"""The recipe's sampler for tests with the real trainer: it also writes down each batch as the actor is given it.

Select it with trainer.v1.sampler.custom_sampler.path=pkg://tests.recording_sampler and
trainer.v1.sampler.custom_sampler.name=RecordingReplayBuffer; BATCHES_FILE in the environment names the file.
"""

import json
import os
from typing import Any

import transfer_queue as tq

from browser_sampler import BrowserReplayBuffer

BATCHES_FILE = "TEST_BATCHES_FILE"


class RecordingReplayBuffer(BrowserReplayBuffer):
    """Appends one JSON line for each batch: its rows in order, and the mini-batch size that the actor is told."""

    def sample(self, *args: Any, **kwargs: Any) -> tuple:
        """Return what the recipe's sampler returns."""
        trainer = self.refill_fn.__self__
        if "_update_actor" not in vars(trainer):
            trainer._update_actor = self._recorded(trainer, trainer._update_actor)
        return super().sample(*args, **kwargs)

    @staticmethod
    def _recorded(trainer: Any, update_actor: Any) -> Any:
        def recorded(batch: Any, metrics: dict) -> Any:
            fields = ["advantages", "response_mask", "rm_scores", "input_ids", "extra_fields"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            columns = {name: list(data[name]) for name in fields}
            rows = []
            for number, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
                mask, advantages = columns["response_mask"][number], columns["advantages"][number]
                extra = columns["extra_fields"][number]
                extra = getattr(extra, "data", extra)
                rows.append(
                    {
                        "key": key,
                        "padding": bool(tag.get("is_padding", False)),
                        "advantages": sorted(set(advantages[mask.bool()].tolist())),
                        "trained_tokens": int(mask.sum()),
                        "reward": float(columns["rm_scores"][number].sum()),
                        "input_ids": columns["input_ids"][number].tolist(),
                        "row": [extra["rollout_row"], extra["rollout_rows"]],
                    }
                )
            result = update_actor(batch, metrics)
            line = {"step": trainer.global_steps, "mini_batch": batch.extra_info["mini_batch_size"], "rows": rows}
            with open(os.environ[BATCHES_FILE], "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            return result

        return recorded
