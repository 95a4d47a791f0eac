"""Rows cut to what a training row may hold: only at the borders of calls, and never the scored call."""

import random

import pytest

from call_forest import CallForestError, CallRecord, plan_rows
from row_limits import limit_rows

WIDE = {"max_rows": 16, "max_prompt_tokens": 100, "max_response_tokens": 100}


def calls(*links, prompt=2, response=3):
    """Return calls `name` or `parent>name`, each with its own tokens."""
    records = []
    for number, link in enumerate(links):
        parent, _, name = link.rpartition(">")
        first = 10 * number
        records.append(
            CallRecord(
                name,
                parent or None,
                prompt_ids=range(first, first + prompt),
                response_ids=range(first + prompt, first + prompt + response),
            )
        )
    return records


def planned(records, policy="all_captured", scored=None):
    scored = scored or records[-1].call_id
    return plan_rows(records, policy=policy, kept=[scored] if policy == "all_captured" else None, scored=scored)


def shape(limited):
    """Return each row as its calls, those that train in capitals."""
    return [
        "".join(c.call_id.upper() if t else c.call_id for c, t in zip(row.calls, row.trains, strict=True))
        for row in limited.rows
    ]


CHAIN = calls("a", "a>b", "b>c")
FAN = calls("a", "a>b", "a>c", "a>d")


@pytest.mark.parametrize(
    ("records", "scored", "limits", "rows", "cut"),
    [
        (CHAIN, "c", {}, ["ABC"], ()),
        (CHAIN, "b", {"max_response_tokens": 8}, ["AB"], ("c",)),
        (CHAIN, "a", {"max_response_tokens": 3}, ["A"], ("b", "c")),
        (FAN, "d", {}, ["AB", "aC", "aD"], ()),
        (FAN, "d", {"max_rows": 2}, ["AB", "aD"], ("c",)),
        (FAN, "d", {"max_rows": 1}, ["AD"], ("b", "c")),
        (FAN, "b", {"max_rows": 2}, ["AB", "aC"], ("d",)),
        (FAN, "a", {"max_response_tokens": 7}, ["A"], ("b", "c", "d")),
    ],
)
def test_rows_are_cut_at_the_borders_of_calls_and_what_is_left_trains_once(records, scored, limits, rows, cut):
    limited = limit_rows(planned(records, scored=scored), scored, **WIDE | limits)
    assert (shape(limited), limited.cut_ids) == (rows, cut)


@pytest.mark.parametrize(
    ("scored", "limits"),
    [("c", {"max_response_tokens": 12}), ("a", {"max_response_tokens": 2}), ("c", {"max_prompt_tokens": 1})],
)
def test_rollout_whose_scored_call_would_be_cut_is_refused(scored, limits):
    with pytest.raises(CallForestError, match=f"scored call '{scored}' does not fit"):
        limit_rows(planned(CHAIN, scored=scored), scored, **WIDE | limits)


@pytest.mark.parametrize("seed", range(30))
def test_on_random_forests_every_row_fits_and_no_call_trains_twice(seed):
    rng = random.Random(seed)
    records = []
    for number in range(rng.randint(1, 25)):
        parent = rng.choice([None, *range(number)]) if number else None
        records.append(
            CallRecord(
                f"{number}",
                None if parent is None else f"{parent}",
                prompt_ids=[number] * rng.randint(1, 6),
                response_ids=[number] * rng.randint(1, 6),
            )
        )
    limits = {"max_rows": rng.randint(1, 6), "max_prompt_tokens": 6, "max_response_tokens": rng.randint(6, 30)}
    rows = plan_rows(records, policy="all_captured", scored="0")
    limited = limit_rows(rows, "0", **limits)
    assert 1 <= len(limited.rows) <= limits["max_rows"]
    assert all(row.num_tokens - row.prompt_length <= limits["max_response_tokens"] for row in limited.rows)
    trained = [c.call_id for row in limited.rows for c, t in zip(row.calls, row.trains, strict=True) if t]
    assert len(trained) == len(set(trained))
    assert "0" in trained
    assert sorted([*trained, *limited.cut_ids]) == sorted(record.call_id for record in records)
    whole = {row.call_ids for row in rows}
    assert all(any(row.call_ids == ids[: len(row.call_ids)] for ids in whole) for row in limited.rows)
