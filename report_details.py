"""Which episodes a report holds turn by turn, and how texts from the web and the policy get into its page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from episode_record import AttemptOutcome
from report_figures import Attempt
from report_log import EpisodeFiles

MOST_BYTES = 16_000_000
"""Of all episodes that are held turn by turn: a page must open on a phone."""


@dataclass(frozen=True)
class Details:
    """The episodes that a page holds turn by turn."""

    texts: dict[int, str]
    """JSON that may stand in a script element, by index of the attempt."""
    left_out: int
    """Attempts that were asked for and no longer fitted into MOST_BYTES."""


def script_json(value: Any) -> str:
    """Return JSON that may stand in an HTML script element whatever texts it holds. Raises ValueError on infinity.

    In a script element only `</script` and `<!--` mean anything to HTML. With no `<` left, nothing does. U+2028 and
    U+2029 end a line of JavaScript in old engines. Half a surrogate pair becomes its JSON escape.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def choose(attempts: Sequence[Attempt], most: int, include: Iterable[str] = ()) -> list[int]:
    """Return the indices of at most `most` attempts, whole rollouts at a time, in the order of their choice.

    First come rollouts whose uid or task is in `include`, then in turn: a newest one, one of each kind of failure, a
    slowest one, a costliest one, and a group of a step, the steps spread evenly.
    """
    members: dict[Any, list[int]] = defaultdict(list)
    for index, attempt in enumerate(attempts):
        members[attempt.rollout_key].append(index)
    wanted = set(include)
    first = [a.rollout_key for a in attempts if wanted and (a.uid in wanted or a.task in wanted)]
    newest = [a.rollout_key for a in reversed(attempts)]
    slowest = [a.rollout_key for a in sorted(attempts, key=lambda a: -a.total_s)[: most or 1]]
    costliest = [a.rollout_key for a in sorted(attempts, key=lambda a: -a.tokens)[: most or 1]]
    in_turn = zip_longest(newest, _failed(attempts), slowest, costliest, _spread(attempts))
    chosen: dict[int, None] = {}
    for key in [*first, *(key for keys in in_turn for key in keys if key is not None)]:
        if len(chosen) >= most:
            break
        if members[key][0] not in chosen and len(chosen) + len(members[key]) <= most:
            chosen.update(dict.fromkeys(members[key]))
    return list(chosen)


def embed(files: EpisodeFiles, attempts: Sequence[Attempt], chosen: Sequence[int], most: int = MOST_BYTES) -> Details:
    """Return the chosen attempts' lines as texts for the page, as many as fit into `most` bytes."""
    texts: dict[int, str] = {}
    size, left_out = 0, 0
    for index in chosen:
        try:
            text = script_json(files.record_at(attempts[index].place))
        except ValueError:  # a number too large for JSON somewhere in a turn, or a file that was changed meanwhile
            left_out += 1
            continue
        length = len(text.encode())
        if size + length > most:
            left_out += 1
            continue
        texts[index] = text
        size += length
    return Details(texts, left_out)


def _failed(attempts: Sequence[Attempt]) -> list[Any]:
    """Return rollouts with an invalid attempt: the newest of each kind, then the second newest of each, and so on."""
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for attempt in reversed(attempts):
        if attempt.outcome == AttemptOutcome.INVALID:
            by_kind[attempt.failure_kind].append(attempt.rollout_key)
    ranks = zip_longest(*(by_kind[kind] for kind in sorted(by_kind)))
    return [key for rank in ranks for key in rank if key is not None]


def _spread(attempts: Sequence[Attempt]) -> list[Any]:
    """Return the rollouts of one group of each step, ends and middles of the training first.

    The group is the step's first one with both a success and a failure, which teach the policy; else its first.
    """
    groups: dict[int, dict[str, dict[Any, set[str]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for attempt in attempts:
        groups[attempt.step][attempt.uid][attempt.rollout_key].add(attempt.outcome)
    steps = sorted(groups)
    keys = []
    for position in _halving(len(steps)):
        step = groups[steps[position]]
        mixed = {AttemptOutcome.SUCCESS, AttemptOutcome.FAILURE}
        group = next((g for g in step.values() if mixed <= set().union(*g.values())), next(iter(step.values())))
        keys.extend(group)
    return keys


def _halving(count: int) -> Iterator[int]:
    """Yield 0 to count - 1 so that every beginning of the sequence is spread about evenly."""
    seen: set[int] = set()
    pieces = 1
    while len(seen) < count:
        for piece in range(pieces + 1):
            position = round(piece * (count - 1) / pieces)
            if position not in seen:
                seen.add(position)
                yield position
        pieces *= 2
