"""How many optimizer steps a batch gets, how far it is padded, and which mini-batch and rank each row goes to.

A rollout has as many rows as it needs, and one that the environment spoiled may have none, so that the number of rows
is another in every batch. Here it decides neither the number of optimizer steps nor how much each of them learns from:

- A batch gets the configured number of steps, and fewer only where a step would be left with a lone training row.
- It is padded until the steps divide it among the ranks, and no further.
- Every mini-batch gets its share of the rows that train; those that train nothing fill up evenly.

verl 0.9.1 pads to lcm(dp, ppo_mini_batch_size * n) instead and puts the padding wherever the ranks' workload is even:
with a mini-batch of 512, a batch of 513 rows gets two steps over 1,024. Nothing here imports verl or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import islice


class RowKind(StrEnum):
    """What a row of a batch is there for."""

    TRAINS = "trains"
    FLAGGED = "flagged"
    """Of a rollout that the environment spoiled: it trains no token."""
    PADDING = "padding"


Balance = Callable[[list[int], int], Sequence[Sequence[int]]]
"""Takes workloads and a number of parts that divides theirs; gives the positions in each part, as many in each."""


def configured_steps(prompts: int, mini_batch_prompts: int) -> int:
    """Return how many mini-batches of so many prompts a sampled batch of `prompts` makes: 1 or more, rounded up."""
    return max(1, -(-prompts // mini_batch_prompts))


def optimizer_steps(configured: int, training_rows: int) -> int:
    """Return the number of optimizer steps of one pass over a batch: `configured`, or what leaves 2 rows to each.

    It is 1 where the batch has fewer than 4 rows that train, even if it has none.
    """
    return min(configured, max(1, training_rows // 2))


def padded_size(rows: int, steps: int, ranks: int, rank_multiple: int = 1) -> int:
    """Return the least number of rows from `rows` on that gives each rank the same in each of the steps.

    - `rank_multiple`: divides what a rank gets in a step: its micro-batches' number of rows, 1 where that isn't fixed.

    With 1, less than steps * ranks rows are added, whatever `rows` is.
    """
    multiple = steps * ranks * rank_multiple
    return multiple * -(-rows // multiple)


def arrange(
    workloads: Sequence[int], kinds: Sequence[RowKind], steps: int, ranks: int, balance: Balance
) -> list[list[int]]:
    """Return the positions of the rows that each rank gets, in the order in which it cuts them into mini-batches.

    Joined, the parts are the order in which verl is to get the batch: its dispatch cuts that into `ranks` equal parts,
    and each rank cuts its own into `steps` equal mini-batches. Then

    - each mini-batch, over all ranks, has floor or ceil of training rows / steps rows that train. They are cut in their
      order here, so that neighbours share a mini-batch; so are the flagged ones. Padding fills up.
    - within a mini-batch each rank has the same number of rows, and about the same workload.

    Arguments: one workload and kind a row, of a padded batch. Raises ValueError if the rows do not divide so.
    """
    if len(workloads) != len(kinds):
        raise ValueError(f"{len(workloads)} workloads for {len(kinds)} rows")
    if not kinds or len(kinds) % (steps * ranks):
        raise ValueError(f"{len(kinds)} rows do not divide into {steps} mini-batches on {ranks} ranks; pad them first")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for rows in _mini_batches(kinds, steps):
        shares = [[rows[place] for place in share] for share in balance([workloads[row] for row in rows], ranks)]
        # The heaviest share goes to the rank with the least so far: a rank works through its whole part at once where
        # log probabilities are computed.
        shares.sort(key=lambda share: sum(workloads[row] for row in share), reverse=True)
        for rank, share in zip(sorted(range(ranks), key=loads.__getitem__), shares, strict=True):
            parts[rank] += share
            loads[rank] += sum(workloads[row] for row in share)
    return parts


def _mini_batches(kinds: Sequence[RowKind], steps: int) -> list[list[int]]:
    """Return the positions of the rows of each mini-batch, ascending; all have the same number."""
    of_kind = {kind: [row for row, other in enumerate(kinds) if other == kind] for kind in RowKind}
    training, remainder = divmod(len(of_kind[RowKind.TRAINS]), steps)
    flagged, flagged_remainder = divmod(len(of_kind[RowKind.FLAGGED]), steps)
    rows = {kind: iter(positions) for kind, positions in of_kind.items()}
    mini_batches = []
    for step in range(steps):
        # What training rows leave over goes to the first mini-batches, what flagged ones do to the last: so there is
        # room for both, and the padding that each needs differs by a row at most.
        mini_batch = list(islice(rows[RowKind.TRAINS], training + (step < remainder)))
        mini_batch += islice(rows[RowKind.FLAGGED], flagged + (step >= steps - flagged_remainder))
        mini_batch += islice(rows[RowKind.PADDING], len(kinds) // steps - len(mini_batch))
        mini_batches.append(sorted(mini_batch))
    return mini_batches
