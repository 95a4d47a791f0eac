"""Optimizer steps, padding and the arrangement of a batch: arithmetic alone, without verl."""

from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_batches import RowKind, arrange, configured_steps, optimizer_steps, padded_size

# A busy machine must not fail a property.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

T, F, P = RowKind.TRAINS, RowKind.FLAGGED, RowKind.PADDING


def snake(workloads: list[int], parts: int) -> list[list[int]]:
    """Equal parts of about equal workload, as far as verl's own function is asked for; that one needs torch."""
    assert len(workloads) % parts == 0
    shares: list[list[int]] = [[] for _ in range(parts)]
    for place, row in enumerate(sorted(range(len(workloads)), key=workloads.__getitem__)):
        turn = place % (2 * parts)
        shares[min(turn, 2 * parts - 1 - turn)].append(row)
    return shares


def cut(parts: list[list[int]], steps: int) -> list[list[list[int]]]:
    """The rows that each rank trains in each step."""
    size = len(parts[0]) // steps
    return [[part[step * size : (step + 1) * size] for part in parts] for step in range(steps)]


@st.composite
def batches(draw):
    """Kinds of rows of a sampled batch in its order, without padding; configured steps; ranks; rank multiple."""
    kinds = draw(st.lists(st.sampled_from([T, T, F]), min_size=1, max_size=80))
    return kinds, draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))


def plan(kinds, configured, ranks, multiple=1):
    """Kinds with padding, and the steps."""
    steps = optimizer_steps(configured, kinds.count(T))
    return kinds + [P] * (padded_size(len(kinds), steps, ranks, multiple) - len(kinds)), steps


# --- The number of steps, and the padding ---


@pytest.mark.parametrize(
    ("prompts", "mini_batch_prompts", "want"),
    [(64, 64, 1), (64, 32, 2), (64, 33, 2), (64, 21, 4), (1, 64, 1), (64, 256, 1), (5, 1, 5)],
)
def test_the_config_asks_for_as_many_steps_as_the_prompts_make_mini_batches(prompts, mini_batch_prompts, want):
    assert configured_steps(prompts, mini_batch_prompts) == want


@pytest.mark.parametrize(
    ("configured", "training_rows", "want"),
    [
        pytest.param(1, 513, 1, id="a row too many makes no second step"),
        pytest.param(2, 513, 2, id="two steps stay two"),
        pytest.param(2, 1025, 2, id="twice the rows too"),
        pytest.param(4, 8, 4, id="two rows a step"),
        pytest.param(4, 7, 3, id="no step with a lone row"),
        pytest.param(4, 3, 1, id="three rows make one step"),
        pytest.param(4, 2, 1, id="two rows make one step"),
        pytest.param(4, 1, 1, id="a lone row is a step"),
        pytest.param(4, 0, 1, id="nothing to train on is a step"),
    ],
)
def test_the_configured_steps_are_taken_unless_one_would_see_a_lone_row(configured, training_rows, want):
    assert optimizer_steps(configured, training_rows) == want


@pytest.mark.parametrize(
    ("rows", "steps", "ranks", "multiple", "want"),
    [
        (512, 2, 8, 1, 512),
        (513, 2, 8, 1, 528),
        (30, 1, 1, 1, 30),
        (30, 1, 8, 1, 32),
        (1, 1, 8, 1, 8),
        (513, 2, 8, 4, 576),
        (576, 2, 8, 4, 576),
    ],
)
def test_the_padding_fills_the_last_row_of_ranks_in_each_step(rows, steps, ranks, multiple, want):
    assert padded_size(rows, steps, ranks, multiple) == want


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_there_is_less_padding_than_one_more_row_a_rank_and_step_would_need(rows, steps, ranks, multiple):
    size = padded_size(rows, steps, ranks, multiple)
    assert 0 <= size - rows < steps * ranks * multiple
    assert size % (steps * ranks * multiple) == 0


@given(st.integers(1, 16), st.lists(st.integers(0, 5000), min_size=2, max_size=2))
def test_more_rows_never_make_fewer_steps_and_enough_rows_make_no_difference(configured, rows):
    fewer, more = sorted(rows)
    assert optimizer_steps(configured, fewer) <= optimizer_steps(configured, more) <= configured
    assert fewer < 2 * configured or optimizer_steps(configured, fewer) == configured
    assert fewer < 2 or fewer // optimizer_steps(configured, fewer) >= 2


# --- The arrangement ---


@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_nothing_is_lost_or_doubled_and_the_ranks_have_the_same_number_of_rows_in_each_step(batch, random):
    kinds, configured, ranks, multiple = batch
    padded, steps = plan(kinds, configured, ranks, multiple)
    parts = arrange([random.randrange(1, 9999) for _ in padded], padded, steps, ranks, snake)
    assert sorted(chain.from_iterable(parts)) == list(range(len(padded)))
    sizes = {len(share) for mini_batch in cut(parts, steps) for share in mini_batch}
    assert sizes == {len(padded) // (steps * ranks)}
    assert sizes.pop() % multiple == 0


@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_every_mini_batch_has_its_share_of_each_kind_of_row(batch, random):
    kinds, configured, ranks, multiple = batch
    padded, steps = plan(kinds, configured, ranks, multiple)
    parts = arrange([random.randrange(1, 9999) for _ in padded], padded, steps, ranks, snake)
    counts = [[padded[row] for share in mini_batch for row in share] for mini_batch in cut(parts, steps)]
    for kind in (T, F):
        share = padded.count(kind) // steps
        assert {rows.count(kind) - share for rows in counts} <= {0, 1}
    paddings = [rows.count(P) for rows in counts]
    assert max(paddings) - min(paddings) <= 1
    assert padded.count(T) < 2 or min(rows.count(T) for rows in counts) >= 2


@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_rows_that_train_keep_their_order_from_step_to_step(batch, random):
    kinds, configured, ranks, _ = batch
    padded, steps = plan(kinds, configured, ranks)
    parts = arrange([random.randrange(1, 9999) for _ in padded], padded, steps, ranks, snake)
    for kind in (T, F):
        in_steps = [
            sorted(row for row in chain.from_iterable(mini_batch) if padded[row] is kind)
            for mini_batch in cut(parts, steps)
        ]
        assert list(chain.from_iterable(in_steps)) == [row for row, other in enumerate(padded) if other is kind]


@pytest.mark.parametrize(
    ("kinds", "steps", "want"),
    [
        pytest.param([T] * 8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]], id="rows only"),
        pytest.param([T] * 5 + [P], 2, [[0, 1, 2], [3, 4, 5]], id="padding fills up"),
        pytest.param([F, F, T, T, T, T, F, F], 2, [[0, 1, 2, 3], [4, 5, 6, 7]], id="flagged rows are dealt too"),
        pytest.param([T, T, T, T, T, F, F, F], 2, [[0, 1, 2, 5], [3, 4, 6, 7]], id="flagged rows make up"),
        pytest.param([F, T, F, T, F, P], 1, [[0, 1, 2, 3, 4, 5]], id="one step"),
        pytest.param([F, F, F, P], 2, [[0, 3], [1, 2]], id="nothing trains"),
    ],
)
def test_mini_batches_are_cut_in_the_order_of_the_rows(kinds, steps, want):
    parts = arrange([1] * len(kinds), kinds, steps, 1, snake)
    assert [sorted(mini_batch[0]) for mini_batch in cut(parts, steps)] == want


def test_within_a_step_the_ranks_get_what_the_balance_gives():
    parts = arrange([9, 1, 1, 9, 5, 5, 5, 5], [T] * 8, 2, 2, snake)
    assert [[sum([9, 1, 1, 9, 5, 5, 5, 5][row] for row in share) for share in step] for step in cut(parts, 2)] == [
        [10, 10],
        [10, 10],
    ]


def test_the_heaviest_share_of_a_step_goes_to_the_rank_that_has_had_the_least():
    workloads = [100, 1, 80, 1, 60, 1]
    parts = arrange(workloads, [T] * 6, 3, 2, snake)
    assert sorted(sum(workloads[row] for row in part) for part in parts) == [102, 141]  # not [3, 240]


@pytest.mark.parametrize(
    ("workloads", "kinds", "steps", "ranks", "said"),
    [
        ([1], [T, T], 1, 1, "1 workloads for 2 rows"),
        ([1] * 3, [T] * 3, 2, 1, "3 rows do not divide into 2 mini-batches on 1 ranks; pad them first"),
        ([1] * 4, [T] * 4, 2, 4, "4 rows do not divide into 2 mini-batches on 4 ranks"),
        ([], [], 1, 1, "0 rows do not divide"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(workloads, kinds, steps, ranks, said):
    with pytest.raises(ValueError, match=said):
        arrange(workloads, kinds, steps, ranks, snake)
