"""The figures of a run's report, counted from its episode log; pure functions of what the lines say.

A rollout's outcome is that of its last attempt. Where that is not final, the rollout is unfinished (a retry is under
way, or its worker died) and stands in no rate. Success is an outcome of `success`: a reward of 1 or more.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from episode_record import AttemptOutcome
from report_log import EpisodeFiles, Place

Z95 = 1.959964
"""The normal distribution's 97.5% quantile."""
MOST_PERIODS = 60
"""Points of a curve; a longer run has several steps in each."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the report keeps of every line."""

    place: Place
    ended_at: float
    step: int
    training: bool
    """Whether its split is one that trains: `train...` or none."""
    split: str
    uid: str
    rollout: int
    attempt: int
    final: bool
    task: str
    site: str
    question: str
    outcome: str
    reward: float | None
    failure_kind: str
    failure_fault: str
    stop_reason: str
    last_call: str
    turns: int
    unusable_calls: int
    compactions: int
    generation_s: float
    environment_s: float
    waiting_s: float
    judge_s: float
    generated_tokens: int
    """Of all model calls; of the training rows' responses where an older line lists no calls."""
    prompt_tokens: int
    """That the calls were given and that no call before them held; of the rows where a line lists no calls."""
    passing: tuple[tuple[str, str], ...]
    """Failures and mistakes that the episode went on after: kind and action."""

    @property
    def rollout_key(self) -> tuple[Any, ...]:
        """What the attempts at one rollout share. Without a uid, an attempt stands alone."""
        return (self.split, self.step, self.uid, self.rollout) if self.uid else (self.place.file, self.place.offset)

    @property
    def total_s(self) -> float:
        """Seconds that the attempt took, as far as they are accounted for."""
        return self.generation_s + self.environment_s + self.waiting_s + self.judge_s

    @property
    def tokens(self) -> int:
        """Tokens that the attempt cost."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def opened_session(self) -> bool:
        """Whether the seed went through, as far as the line tells."""
        return bool(self.turns) or self.last_call not in ("", "seed")

    @classmethod
    def of(cls, place: Place, record: Mapping[str, Any]) -> Attempt:
        """Return what the report keeps of a line. Raises ValueError if its turns or calls are no such."""
        share = sys.intern  # a hundred thousand lines share their few names
        calls = record["call_records"]
        try:
            prompt, generated = record["prompt_tokens"], record["response_tokens"]
            if calls:
                prompt, generated = (_total(calls, name) for name in ("prompt_tokens", "generated_tokens"))
            passing = tuple(_passing(record))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a turn or call can't be counted: {type(error).__name__}: {error}") from error
        split = record["split"]
        return cls(
            place=place,
            ended_at=float(record["ended_at"]),
            step=int(record["global_step"]),
            training=not split or split.startswith("train"),
            split=share(split),
            uid=share(record["uid"]),
            rollout=int(record["rollout"]),
            attempt=int(record["attempt"]),
            final=bool(record["final"]),
            task=share(record["task_id"] or record["uid"]),
            site=share(record["site"]),
            question=share(record["question"]),
            outcome=share(record["outcome"]),
            reward=record["reward"],
            failure_kind=share(record["failure_kind"]),
            failure_fault=share(record["failure_fault"]),
            stop_reason=share(record["stop_reason"]),
            last_call=share(record["last_call"]),
            turns=int(record["turns"]),
            unusable_calls=int(record["unusable_calls"]),
            compactions=int(record["compactions"]),
            generation_s=float(record["generation_s"]),
            environment_s=float(record["environment_s"]),
            waiting_s=float(record["waiting_s"]),
            judge_s=float(record["judge_s"]),
            generated_tokens=generated,
            prompt_tokens=prompt,
            passing=passing,
        )


def new_attempts(files: EpisodeFiles, progress: Callable[[int], None] | None = None) -> Iterator[Attempt]:
    """Yield the attempts of lines that were not read before. What can't be counted becomes a problem of the files."""
    for place, record in files.new_records(progress):
        try:
            attempt = Attempt.of(place, record)
        except ValueError as error:
            files.add_problem(f"{files.paths[place.file].name}:{place.line}: {error}")
            continue
        yield attempt


def _total(calls: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return the sum over the calls. Raises TypeError on what is no whole number: infinity has no place in a page."""
    for call in calls:
        if not isinstance(call[name], int):
            raise TypeError(f"{name} is {str(call[name])[:40]!r}")
    return sum(call[name] for call in calls)


def _passing(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield kind and action of each failure and mistake within the episode, the one that ended it left out."""
    turns = record["turn_records"]
    for index, turn in enumerate(turns):
        for mistake in [*turn.get("discarded", ()), *([turn["mistake"]] if turn.get("mistake") else ())]:
            yield sys.intern(f"{mistake}"), "reply"
        kind = turn.get("failure_kind")
        if kind and not (index == len(turns) - 1 and kind == record["failure_kind"]):
            yield sys.intern(f"{kind}"), sys.intern(f"{turn['action']}")


@dataclass(frozen=True)
class Rate:
    """A share of rollouts."""

    solved: int
    rollouts: int

    @property
    def value(self) -> float | None:
        """The share; None without a rollout."""
        return self.solved / self.rollouts if self.rollouts else None

    def interval(self) -> tuple[float, float] | None:
        """Return the 95% interval that takes rollouts as independent; None without a rollout.

        Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
        """
        if not self.rollouts:
            return None
        n, p = self.rollouts, self.solved / self.rollouts
        centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Counts:
    """Counts over some attempts and over the rollouts that end among them."""

    attempts: int
    invalid_attempts: int
    solved: int
    valid: int
    invalid: int
    unfinished: int
    """Rollouts whose last attempt was not final."""
    reward_sum: float
    """Of the valid rollouts."""
    turns: int
    """Of all attempts, as are the following."""
    generation_s: float
    environment_s: float
    waiting_s: float
    judge_s: float
    prompt_tokens: int
    generated_tokens: int
    sessions: int
    """Attempts whose session was opened."""
    failures: Mapping[str, int]
    """Invalid attempts by kind."""

    @property
    def over_valid(self) -> Rate:
        """Success over the rollouts that were measured."""
        return Rate(self.solved, self.valid)

    @property
    def over_all(self) -> Rate:
        """Success over all rollouts that are through; an invalid one counts as not solved."""
        return Rate(self.solved, self.valid + self.invalid)

    @property
    def reward(self) -> float | None:
        """Mean reward over the valid rollouts."""
        return self.reward_sum / self.valid if self.valid else None

    def per_attempt(self, total: float) -> float | None:
        """Return a total divided by the attempts."""
        return total / self.attempts if self.attempts else None

    @classmethod
    def of(cls, attempts: Sequence[Attempt], ends: Iterable[Attempt]) -> Counts:
        """Return the counts; `ends` are the last attempts of the rollouts."""
        ends = list(ends)
        through = [end for end in ends if end.final]
        valid = [end for end in through if end.outcome != AttemptOutcome.INVALID]
        failures = Counter(a.failure_kind or "unnamed" for a in attempts if a.outcome == AttemptOutcome.INVALID)
        return cls(
            attempts=len(attempts),
            invalid_attempts=failures.total(),
            solved=sum(end.outcome == AttemptOutcome.SUCCESS for end in valid),
            valid=len(valid),
            invalid=len(through) - len(valid),
            unfinished=len(ends) - len(through),
            reward_sum=math.fsum(end.reward or 0.0 for end in valid),
            turns=sum(a.turns for a in attempts),
            generation_s=math.fsum(a.generation_s for a in attempts),
            environment_s=math.fsum(a.environment_s for a in attempts),
            waiting_s=math.fsum(a.waiting_s for a in attempts),
            judge_s=math.fsum(a.judge_s for a in attempts),
            prompt_tokens=sum(a.prompt_tokens for a in attempts),
            generated_tokens=sum(a.generated_tokens for a in attempts),
            sessions=sum(a.opened_session for a in attempts),
            failures=dict(failures),
        )


@dataclass(frozen=True)
class Period:
    """Counts over some steps in a row."""

    first_step: int
    last_step: int
    counts: Counts
    task_error: float | None
    """Standard error of success over valid rollouts, every task counted once; None with fewer than two tasks."""


@dataclass(frozen=True)
class Row:
    """Counts of one line of a table."""

    name: str
    counts: Counts
    question: str = ""


@dataclass(frozen=True)
class Part:
    """Figures of the training or of the validations."""

    splits: tuple[str, ...]
    total: Counts
    periods: tuple[Period, ...]
    sites: tuple[Row, ...]
    tasks: tuple[Row, ...]
    """All of them, those with the most rollouts first."""


@dataclass(frozen=True)
class RunFigures:
    """All figures of a report."""

    training: Part
    validation: Part
    total: Counts
    periods: tuple[Period, ...]
    """Of training and validations together."""
    faults: Mapping[str, str]
    """Whose doing each failure kind is."""
    invalid_rollouts: Mapping[str, int]
    """Rollouts that stayed invalid, by the kind of their last attempt's failure."""
    failures_by_call: Mapping[tuple[str, str], int]
    """Invalid attempts by kind and last call to the environment."""
    failures_by_turn: Mapping[tuple[str, int], int]
    """Invalid attempts by kind and number of turns."""
    passing: Mapping[tuple[str, str], int]
    """Failures and mistakes that an episode went on after, by kind and action."""
    stop_reasons: Mapping[str, int]
    attempts_of_rollouts: Mapping[int, int]
    """Rollouts by number of attempts."""
    first_end: float
    last_end: float
    """Unix times."""


def last_attempts(attempts: Iterable[Attempt]) -> dict[tuple[Any, ...], Attempt]:
    """Return the last attempt of each rollout."""
    ends: dict[tuple[Any, ...], Attempt] = {}
    for attempt in attempts:
        before = ends.get(attempt.rollout_key)
        if before is None or (before.attempt, before.ended_at) <= (attempt.attempt, attempt.ended_at):
            ends[attempt.rollout_key] = attempt
    return ends


def figures_of(attempts: Sequence[Attempt]) -> RunFigures:
    """Return the figures of these attempts, of which there is at least one."""
    ends = last_attempts(attempts)
    invalid = [a for a in attempts if a.outcome == AttemptOutcome.INVALID]
    return RunFigures(
        training=_part([a for a in attempts if a.training], [e for e in ends.values() if e.training]),
        validation=_part([a for a in attempts if not a.training], [e for e in ends.values() if not e.training]),
        total=Counts.of(attempts, ends.values()),
        periods=tuple(_periods(attempts, list(ends.values()))),
        invalid_rollouts=Counter(
            e.failure_kind or "unnamed" for e in ends.values() if e.final and e.outcome == AttemptOutcome.INVALID
        ),
        faults={a.failure_kind or "unnamed": a.failure_fault for a in invalid},
        failures_by_call=Counter((a.failure_kind or "unnamed", a.last_call or "none") for a in invalid),
        failures_by_turn=Counter((a.failure_kind or "unnamed", a.turns) for a in invalid),
        passing=Counter(pair for a in attempts for pair in a.passing),
        stop_reasons=Counter(a.stop_reason or "unnamed" for a in attempts if a.outcome != AttemptOutcome.INVALID),
        attempts_of_rollouts=Counter(end.attempt for end in ends.values()),
        first_end=min(a.ended_at for a in attempts),
        last_end=max(a.ended_at for a in attempts),
    )


def _part(attempts: Sequence[Attempt], ends: Sequence[Attempt]) -> Part:
    return Part(
        splits=tuple(sorted({a.split for a in attempts})),
        total=Counts.of(attempts, ends),
        periods=tuple(_periods(attempts, ends)),
        sites=tuple(_rows(attempts, ends, "site")),
        tasks=tuple(_rows(attempts, ends, "task")),
    )


def _periods(attempts: Sequence[Attempt], ends: Sequence[Attempt]) -> Iterable[Period]:
    """Yield counts by step, or by several steps in a row where there are more than MOST_PERIODS of them."""
    steps = sorted({a.step for a in attempts})
    width = -(-len(steps) // MOST_PERIODS)
    period_of = {step: index // width for index, step in enumerate(steps)} if steps else {}
    by_attempt, by_end = defaultdict(list), defaultdict(list)
    for attempt in attempts:
        by_attempt[period_of[attempt.step]].append(attempt)
    for end in ends:
        by_end[period_of[end.step]].append(end)
    for period, members in sorted(by_attempt.items()):
        in_it = [a.step for a in members]
        counts = Counts.of(members, by_end[period])
        yield Period(min(in_it), max(in_it), counts, task_error(by_end[period]))


def _rows(attempts: Sequence[Attempt], ends: Sequence[Attempt], key: str) -> Iterable[Row]:
    by_attempt, by_end = defaultdict(list), defaultdict(list)
    for attempt in attempts:
        by_attempt[getattr(attempt, key)].append(attempt)
    for end in ends:
        by_end[getattr(end, key)].append(end)
    rows = [
        Row(name, Counts.of(members, by_end[name]), members[0].question if key == "task" else "")
        for name, members in by_attempt.items()
    ]
    return sorted(rows, key=lambda row: (-row.counts.over_all.rollouts, row.name))


def task_error(ends: Iterable[Attempt]) -> float | None:
    """Return the standard error of success over valid rollouts with every task counted once; None below two tasks."""
    by_task = defaultdict(list)
    for end in ends:
        if end.final and end.outcome != AttemptOutcome.INVALID:
            by_task[end.task].append(end.outcome == AttemptOutcome.SUCCESS)
    means = [sum(solved) / len(solved) for solved in by_task.values()]
    if len(means) < 2:
        return None
    mean = math.fsum(means) / len(means)
    return math.sqrt(math.fsum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))
