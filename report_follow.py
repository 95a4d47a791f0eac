"""A running training in the terminal: steps, success, failures, sessions and what is stuck, in 80 columns.

Each refresh reads what the episode log has grown by. Without a terminal, as in a log, news are a line each.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from episode_record import AttemptOutcome
from report_figures import Attempt, Counts, Rate, last_attempts, new_attempts
from report_log import EpisodeFiles, NoEpisodesError, find_episodes
from report_metrics import SessionMetrics

STUCK_S = 600.0
"""Seconds of silence after which something counts as stuck: several times what an attempt takes."""
RECENT_S = 600.0
STEPS = 6
KINDS = 5
STUCK_LINES = 5
HOPELESS_ROLLOUTS = 4
"""Rollouts of a task without a single valid one, from which on it is named."""

_SPAN = re.compile(r"[\d.]+ (s|min|h)\b")
"""A span that grows is no news."""


class FollowedRun:
    """What is known of a run so far."""

    def __init__(self, run: Path, episodes: Path | None = None) -> None:
        self.run = run
        self.attempts: list[Attempt] = []
        self.sessions: Mapping[str, Mapping[int, float]] = {}
        self.files: EpisodeFiles | None = None
        self.trouble = ""
        """Why the last reading ended before its end; empty if it did not."""
        self._episodes = episodes
        self._metrics = SessionMetrics(run)

    def read_new(self) -> int:
        """Return how many attempts are new since the last call. What can't be read now is tried again in the next."""
        before = len(self.attempts)
        try:
            self._read()
            self.trouble = ""
        except OSError as error:  # a network file system that stumbles must not end hours of following
            self.trouble = f"can't read {error.filename}: {error.strerror}"
        return len(self.attempts) - before

    def _read(self) -> None:
        if self.files is None:
            try:
                self.files = EpisodeFiles(find_episodes(self.run, self._episodes))
            except NoEpisodesError:
                return
        for attempt in new_attempts(self.files):  # one by one: those before a trouble are kept
            self.attempts.append(attempt)
        self.sessions = self._metrics.read_new()


def follow(
    run: Path,
    episodes: Path | None = None,
    interval_s: float = 5.0,
    console: Console | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Show the run until Ctrl-C; return the exit status 0."""
    console = console or Console()
    followed = FollowedRun(run, episodes)
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    followed.read_new()
                    live.update(view(followed, time.time()), refresh=True)
                    wait(interval_s)
        shown: set[str] = set()
        while True:
            followed.read_new()
            lines = {_SPAN.sub("", line): line for line in plain_lines(followed, time.time())}
            for line in (line for key, line in lines.items() if key not in shown):
                console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, highlight=False, soft_wrap=True)
            shown = set(lines)
            wait(interval_s)
    except KeyboardInterrupt:
        return 0


def view(followed: FollowedRun, now: float) -> RenderableType:
    """Return what the terminal shows at a Unix time."""
    attempts = followed.attempts
    title = Text(printable(followed.run.resolve().name), style="bold")
    if not attempts:
        return Group(title, Text("waiting for the first attempt to end"), *_stuck_lines(followed, now))
    last = max(a.ended_at for a in attempts)
    recent = sum(a.ended_at > now - RECENT_S for a in attempts)
    total = Counts.of(attempts, last_attempts(attempts).values())
    summary = (
        f"{total.attempts} attempts; rollouts: {total.valid} valid, {total.invalid} invalid, {total.unfinished} "
        f"unfinished\nlast end {span(now - last)} ago; {recent * 60 / RECENT_S:.1f} attempts a minute"
    )
    parts = [title, Text(summary), _steps_table(attempts)]
    if total.failures:
        parts.append(_failures_table(attempts, total, now))
    parts.append(Text(session_text(followed)))
    return Group(*parts, *_stuck_lines(followed, now))


def plain_lines(followed: FollowedRun, now: float) -> list[str]:
    """Return a line for each of the last steps, and one for each thing that is stuck."""
    if not followed.attempts:
        return ["waiting for the first attempt to end"]
    lines = []
    for (step, training), members in _last_steps(followed.attempts):
        counts = Counts.of(members, last_attempts(members).values())
        kinds = ", ".join(f"{printable(k)} {n}" for k, n in Counter(counts.failures).most_common())
        lines.append(
            f"step {step} {'training' if training else 'validation'}: success over valid {share(counts.over_valid)}, "
            f"over all {share(counts.over_all)}, {counts.invalid} invalid, {counts.unfinished} unfinished"
            + (f"; invalid attempts: {kinds}" if kinds else "")
        )
    if followed.sessions:
        lines.append(session_text(followed))
    return [*lines, *(f"STUCK: {sentence}" for sentence in stuck(followed, now))]


def stuck(followed: FollowedRun, now: float) -> list[str]:
    """Return a sentence for each thing that doesn't move or never works, the most important first."""
    attempts, files = followed.attempts, followed.files
    sentences = [printable(followed.trouble, most=200)] if followed.trouble else []
    if files is None or not attempts:
        return sentences
    newest = max(a.ended_at for a in attempts)
    if now - newest > STUCK_S:
        sentences.append(f"no attempt has ended for {span(now - newest)}")
    else:
        step = max(a.step for a in attempts)
        active = {a.place.file for a in attempts if a.step >= step - 1}
        for file, path in enumerate(files.paths):
            if file in active and newest - files.last_write[file] > STUCK_S:
                silent_s = now - files.last_write[file]
                sentences.append(f"{path.name}: its process has logged nothing for {span(silent_s)}")
    ends = last_attempts(attempts)
    waiting = [end for end in ends.values() if not end.final and now - end.ended_at > STUCK_S]
    if waiting:
        oldest = min(waiting, key=lambda end: end.ended_at)
        sentences.append(
            f"rollouts to be tried again that have not ended: {len(waiting)}, for up to "
            f"{span(now - oldest.ended_at)} (step {oldest.step}, {printable(oldest.task)})"
        )
    by_task: dict[str, list[Attempt]] = defaultdict(list)
    for end in ends.values():
        if end.final:
            by_task[end.task].append(end)
    for task, members in sorted(by_task.items()):
        if len(members) >= HOPELESS_ROLLOUTS and all(end.outcome == AttemptOutcome.INVALID for end in members):
            kind, count = Counter(end.failure_kind for end in members).most_common(1)[0]
            sentences.append(f"task {printable(task)}: none of {len(members)} valid ({printable(kind)} {count})")
    return sentences


def session_text(followed: FollowedRun) -> str:
    """Return the sessions of the last step that the trainer counted, or those that the log tells of."""
    if followed.sessions:
        parts = [f"{name} {values[max(values)]:g}" for name, values in followed.sessions.items()]
        step = max(max(values) for values in followed.sessions.values())
        return f"sessions in step {step}: {', '.join(parts)}"
    opened = sum(a.opened_session for a in followed.attempts)
    return f"sessions: {opened} opened and closed in the log"


def share(rate: Rate) -> str:
    """Return a rate with its counts."""
    return "none" if rate.value is None else f"{rate.value:.3f} ({rate.solved}/{rate.rollouts})"


def span(seconds: float) -> str:
    """Return a span of time in the unit that reads best."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def printable(text: str, most: int = 60) -> str:
    """Return a text from the log that can't control the terminal, on one line of at most so many characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def _last_steps(attempts: Sequence[Attempt]) -> list[tuple[tuple[int, bool], list[Attempt]]]:
    """Return the attempts of the last STEPS steps, training and validation apart."""
    wanted = set(sorted({(a.step, a.training) for a in attempts})[-STEPS:])
    by_step: dict[tuple[int, bool], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if (attempt.step, attempt.training) in wanted:
            by_step[attempt.step, attempt.training].append(attempt)
    return sorted(by_step.items())


def _steps_table(attempts: Sequence[Attempt]) -> Table:
    table = Table(box=None, padding=(0, 1), title="last steps", title_justify="left", title_style="bold")
    for name in ("step", "split", "success over valid", "over all", "invalid", "turns", "s"):
        table.add_column(name, justify="left" if name == "split" else "right", no_wrap=True)
    for (step, training), members in _last_steps(attempts):
        counts = Counts.of(members, last_attempts(members).values())
        turns = (counts.per_attempt(counts.turns) or 0.0, counts.per_attempt(sum(a.total_s for a in members)) or 0.0)
        cells = (str(step), "train" if training else "val", share(counts.over_valid), share(counts.over_all))
        table.add_row(*cells, str(counts.invalid), f"{turns[0]:.1f}", f"{turns[1]:.1f}")
    return table


def _failures_table(attempts: Sequence[Attempt], total: Counts, now: float) -> Table:
    recent = Counter(
        a.failure_kind or "unnamed"
        for a in attempts
        if a.outcome == AttemptOutcome.INVALID and a.ended_at > now - RECENT_S
    )
    table = Table(box=None, padding=(0, 1), title="invalid attempts", title_justify="left", title_style="bold")
    for name in ("kind", "all", f"last {span(RECENT_S)}"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    ranked = sorted(total.failures.items(), key=lambda item: (-recent[item[0]], -item[1], item[0]))
    for kind, count in ranked[:KINDS]:
        table.add_row(Text(printable(kind)), str(count), str(recent[kind]))
    if len(ranked) > KINDS:
        table.add_row(f"and {len(ranked) - KINDS} more kinds", str(sum(count for _, count in ranked[KINDS:])), "")
    return table


def _stuck_lines(followed: FollowedRun, now: float) -> list[Text]:
    sentences = stuck(followed, now)
    lines = [Text(f"STUCK: {sentence}", style="bold red") for sentence in sentences[:STUCK_LINES]]
    if len(sentences) > STUCK_LINES:
        lines.append(Text(f"and {len(sentences) - STUCK_LINES} more", style="bold red"))
    if followed.files is not None and followed.files.unreadable:
        lines.append(Text(f"{followed.files.unreadable} lines of the log can't be read"))
    return lines
