"""Which tasks of a list become rows: one of each, of the wanted sites and ids, whose dates have not passed.

Nothing disappears without a trace: every task that is left out comes back with its reason, every task whose text was
changed with both texts.
"""

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum

from row_faults import RowProblem
from task_columns import Task
from task_dates import TextDates, find_dates, names_relative_time, shift_dates


class Reason(StrEnum):
    """Why a task is left out."""

    BAD_ROW = "bad row"
    REPEATED = "repeated"
    OTHER_SITE = "not of --sites"
    OTHER_ID = "not of --ids"
    EXCLUDED = "excluded by --exclude-ids"
    EXPIRED = "expired"
    NOT_SHIFTABLE = "expired and not shiftable"
    SAME_CONTENT = "same question and start page as another task"
    OVER_LIMIT = "beyond --limit"


class Expired(StrEnum):
    """What to do with a task that names a day before the day of reference."""

    SKIP = "skip"
    KEEP = "keep"
    SHIFT = "shift"


@dataclass(frozen=True, slots=True)
class Note:
    """Something about one task, or about one line of a file, that the user should know."""

    task_id: str | None
    file: str
    line: int | None
    text: str
    reason: Reason | None = None
    """Set for a task that is left out."""


@dataclass(frozen=True, slots=True)
class ShiftedTask:
    """A task whose dates were moved."""

    task_id: str
    file: str
    line: int
    original: str
    text: str
    dates: tuple[str, ...]
    """The dates as the original text wrote them."""
    years: int
    reason: str


@dataclass(frozen=True)
class Wanted:
    """What to select, as the command line says."""

    sites: tuple[str, ...] = ()
    """Names of sites in any case; empty for all."""
    ids: tuple[str, ...] = ()
    """Empty for all."""
    excluded: tuple[tuple[str, int, str], ...] = ()
    """File, line, id."""
    limit: int | None = None
    today: date | None = None
    expired: Expired = Expired.SKIP


@dataclass
class Selection:
    """What became of a list."""

    tasks: list[Task] = field(default_factory=list)
    left_out: list[Note] = field(default_factory=list)
    shifted: list[ShiftedTask] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)
    dates: Counter[str] = field(default_factory=Counter)
    """Of the tasks whose dates were looked at: how many name what."""

    def leave_out(self, task: Task, reason: Reason, detail: str) -> None:
        """Note that the task is left out."""
        self.left_out.append(Note(task.task_id, task.file, task.line, detail, reason))

    def warn(self, task: Task, text: str) -> None:
        """Note something about a task that stays."""
        self.warnings.append(Note(task.task_id, task.file, task.line, text))


class SelectionError(ValueError):
    """A selection that cannot be made. args: the message, which names the flag and the fix."""


def without_repeats(tasks: Iterable[Task], selection: Selection) -> tuple[list[Task], list[RowProblem]]:
    """Return the tasks with each id once, and a fault for each that differs from the first of its id."""
    kept: dict[str, Task] = {}
    problems = []
    for task in tasks:
        first = kept.setdefault(task.task_id, task)
        if first is task:
            continue
        place = f"{first.file}:{first.line}"
        if (first.content, first.site, first.answer) == (task.content, task.site, task.answer):
            selection.leave_out(task, Reason.REPEATED, f"as {place}")
            continue
        names = ("question", "url", "site", "answer")
        differing = [name for name in names if getattr(task, name) != getattr(first, name)]
        reason = f"{task.task_id!r} stands in {place} too, with another {' and '.join(differing)}"
        problems.append(RowProblem(task.file, task.line, "id", reason, "give each task its own id, or drop one"))
    return list(kept.values()), problems


def select(tasks: list[Task], wanted: Wanted, selection: Selection) -> None:
    """Put the wanted tasks into `selection.tasks`, in the list's order, and note the others.

    Raises SelectionError for a site or an id that the list does not have, and for dates without a day of reference.
    """
    chosen = _chosen(tasks, wanted, selection)
    chosen = _with_usable_dates(chosen, wanted, selection)
    first: dict[tuple[str, str], Task] = {}
    for task in chosen:
        other = first.setdefault(task.content, task)
        if other is not task:
            selection.leave_out(task, Reason.SAME_CONTENT, f"as {other.task_id!r} ({other.file}:{other.line})")
        elif wanted.limit is not None and len(selection.tasks) >= wanted.limit:
            selection.leave_out(task, Reason.OVER_LIMIT, f"--limit {wanted.limit}")
        else:
            selection.tasks.append(task)


def _chosen(tasks: list[Task], wanted: Wanted, selection: Selection) -> list[Task]:
    """Return the tasks that the filters of sites and ids leave."""
    _require_known("--sites", wanted.sites, {task.site for task in tasks}, str.casefold)
    known = {task.task_id for task in tasks}
    _require_known("--ids", wanted.ids, known, str)
    sites, ids = {site.casefold() for site in wanted.sites}, set(wanted.ids)
    excluded = {task_id: (file, line) for file, line, task_id in wanted.excluded}
    for task_id, (file, line) in excluded.items():
        if task_id not in known:
            selection.warnings.append(
                Note(task_id, file, line, "--exclude-ids names an id that the list does not have")
            )
    chosen = []
    for task in tasks:
        if sites and task.site.casefold() not in sites:
            selection.leave_out(task, Reason.OTHER_SITE, task.site)
        elif ids and task.task_id not in ids:
            selection.leave_out(task, Reason.OTHER_ID, "")
        elif task.task_id in excluded:
            file, line = excluded[task.task_id]
            selection.leave_out(task, Reason.EXCLUDED, f"{file}:{line}")
        else:
            chosen.append(task)
    return chosen


def _require_known(flag: str, given: tuple[str, ...], known: set[str], folded) -> None:
    there = {folded(name) for name in known}
    unknown = [name for name in given if folded(name) not in there]
    if not unknown:
        return
    if len(known) <= 40:
        hint = f"it has {', '.join(sorted(known)) or 'no task'}"
    else:
        near = [n for name in unknown[:3] for n in difflib.get_close_matches(name, sorted(known)[:20_000], n=2)]
        hint = f"similar: {', '.join(repr(n) for n in near)}" if near else f"it has {len(known)} others"
    shown = ", ".join(repr(name) for name in unknown[:10]) + (", ..." if len(unknown) > 10 else "")
    raise SelectionError(f"{flag}: the list has no {shown}; {hint}. Fix: write names as the list has them")


def _with_usable_dates(tasks: list[Task], wanted: Wanted, selection: Selection) -> list[Task]:
    """Return the tasks whose dates have not passed, moved ones among them."""
    found = [(task, find_dates(task.question)) for task in tasks]
    dated = [task for task, dates in found if dates.spans]
    if dated and wanted.today is None:
        listed = "".join(f"\n  {t.file}:{t.line}: {t.task_id}: {t.question[:160]}" for t in dated[:5])
        raise SelectionError(
            f"{len(dated)} task(s) name a date, so whether they can still be done depends on the day:{listed}\n"
            "Fix: pass --today YYYY-MM-DD, the first day on which the rows will be used"
        )
    usable = []
    for task, dates in found:
        _count(task, dates, selection)
        if wanted.today is None or not dates.expired(wanted.today):
            usable.append(task)
            continue
        moved = _expired(task, dates, wanted.today, wanted.expired, selection)
        if moved is not None:
            usable.append(moved)
    return usable


def _count(task: Task, dates: TextDates, selection: Selection) -> None:
    counts = selection.dates
    counts["dated"] += any(span.days for span in dates.spans)
    counts["undated"] += any(not span.days for span in dates.spans)
    counts["ambiguous"] += any(span.ambiguous for span in dates.spans)
    counts["relative"] += names_relative_time(task.question)
    for written in dates.impossible:
        selection.warn(task, f"names {written!r}, which no calendar has; left as it is and taken for no date")
    for written in dates.unread:
        selection.warn(task, f"names {written!r}, whose year has two digits; left as it is and taken for no date")


def _expired(task: Task, dates: TextDates, today: date, handling: Expired, selection: Selection) -> Task | None:
    """Return the expired task if it stays, in the form in which it stays."""
    selection.dates["expired"] += 1
    named = ", ".join(repr(span.text) for span in dates.spans if any(day < today for day in span.days))
    why = f"{named} lies before {today}"
    if handling is Expired.SKIP:
        selection.leave_out(task, Reason.EXPIRED, why)
        return None
    if handling is Expired.KEEP:
        selection.warn(task, f"{why}; kept by --expired keep")
        return task
    shift = shift_dates(task.question, dates, today)
    if isinstance(shift, str):
        selection.leave_out(task, Reason.NOT_SHIFTABLE, f"{why}, and {shift}")
        return None
    selection.shifted.append(
        ShiftedTask(task.task_id, task.file, task.line, task.question, shift.text, shift.spans, shift.years, why)
    )
    return replace(task, question=shift.text)
