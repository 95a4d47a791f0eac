"""A rollout's planned rows, cut to what one training row may hold and to how many rows a rollout may have."""

from collections.abc import Sequence
from dataclasses import dataclass

from call_forest import CallForestError, CallRecord, Row


@dataclass(frozen=True)
class LimitedRows:
    """What is left of a rollout's rows."""

    rows: tuple[Row, ...]
    """In planning order."""
    cut_ids: tuple[str, ...]
    """Calls that trained and now train nowhere, in the order of the rows."""


def limit_rows(
    rows: Sequence[Row], scored: str, *, max_rows: int, max_prompt_tokens: int, max_response_tokens: int
) -> LimitedRows:
    """Return the rows cut at the borders of calls, each call trained by the first row that still holds it.

    A row that is too long loses its last calls; one whose first call does not fit is left out. Of too many rows the
    first ones stay, and the one that trains the scored call. Raises CallForestError where the scored call would be
    cut: a rollout without the call that its reward is for must not train on the rest.
    """
    before = [call.call_id for row in rows for call, trains in zip(row.calls, row.trains, strict=True) if trains]
    chains = [chain for row in rows if (chain := _fitting(row, max_prompt_tokens, max_response_tokens))]
    of_scored = next((n for n, chain in enumerate(chains) if any(call.call_id == scored for call in chain)), None)
    if of_scored is None:
        limits = f"{max_prompt_tokens} prompt and {max_response_tokens} response tokens"
        raise CallForestError(f"the scored call {scored!r} does not fit into a row of {limits}; the rollout is invalid")
    stay = {*range(min(len(chains), max_rows if of_scored < max_rows else max_rows - 1)), of_scored}
    limited, trained = [], set()
    for number in sorted(stay):
        trains = tuple(call.call_id not in trained for call in chains[number])
        if any(trains):
            limited.append(Row(chains[number], trains, rows[0].has_logprobs))
            trained.update(call.call_id for call in chains[number])
    return LimitedRows(tuple(limited), tuple(id_ for id_ in before if id_ not in trained))


def _fitting(row: Row, max_prompt_tokens: int, max_response_tokens: int) -> tuple[CallRecord, ...]:
    """Return the row's first calls, as many as fit; none if the first one does not."""
    if row.prompt_length > max_prompt_tokens:
        return ()
    used = -row.prompt_length
    for number, call in enumerate(row.calls):
        used += len(call.prompt_ids) + len(call.response_ids)
        if used > max_response_tokens:
            return row.calls[:number]
    return row.calls
