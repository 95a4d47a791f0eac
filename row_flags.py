"""Which rows of a batch belong to an invalid rollout, as the agent loop wrote it into their `extra_fields`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def fetch_flags(tq: Any, batch: Any) -> list[bool] | None:
    """Return whether each row of a KVBatchMeta is flagged as invalid; None if no row carries the flag."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    if "extra_fields" not in data.keys():
        return None
    rows = _entries(data["extra_fields"], len(batch.keys))
    # What is not a dict was written by an agent loop that is not verl's, nor this recipe's.
    values = [row.get("env_invalid") if isinstance(row, dict) else None for row in rows]
    return checked_flags(values, groups=[key.rsplit("_", 2)[0] for key in batch.keys], names=batch.keys)


def _entries(column: Any, rows: int) -> list:
    """Return the entries of a non-tensor column of TransferQueue, one a row.

    It comes as LinkedList, NonTensorStack or numpy array, or as one value where all rows share it.
    """
    entries = [column] * rows if isinstance(column, dict) else list(column)
    return [getattr(entry, "data", entry) for entry in entries]


def checked_flags(values: Sequence, groups: Sequence[str], names: Sequence) -> list[bool] | None:
    """Return the flags of all rows, False for a row without (None); None if no row carries one.

    Rows without flags come from other agent loops, and an agent loop serves whole groups. Raises RuntimeError if a row
    alone in its group has none, for then a row of this recipe has lost it, and for a flag that is not a bool.
    """
    import numpy as np

    carrying = {group for group, value in zip(groups, values, strict=True) if value is not None}
    if not carrying:
        return None
    for group, value, name in zip(groups, values, names, strict=True):
        if not isinstance(value, bool | np.bool_) and not (value is None and group not in carrying):
            raise RuntimeError(
                f"extra_fields['env_invalid'] of row {name} is {value!r}, so whether its rollout is valid is not "
                "known. The agent loop must set it to True or False on every row"
            )
    return [bool(value) for value in values]
