"""What the preparation of a task list did: `report.json` for programs, a summary for people.

The keys of `report.json`:

    options      the command line's choices that shape the rows, files named as they were given
    counts       read; written {train, validation}; left_out {reason: tasks}; scored_by {environment, judge,
                 judge_with_reference_answer}; reference_answers_not_used (their tasks have a scoring spec);
                 edits {edit: tasks}; shifted; dates {dated, undated, ambiguous, relative, expired}: tasks, those that
                 the filters of sites and ids left, which name a full day, a day without a year, a day with two
                 readings, words such as `latest`, a day before --today
    sites        {site: {train, validation, left_out}}
    bad_rows     with --skip-bad-rows: [{file, line, key, reason, fix}]
    left_out     every task left out otherwise: [{id, file, line, reason, detail}]
    shifted      [{id, file, line, original, text, dates, years, reason}]
    edited       [{id, file, line, edits}]
    warnings     [{id, file, line, text}]
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from row_faults import RowProblem
from task_columns import Edit
from task_rows import TRAIN, VALIDATION
from task_selection import Note, Reason, Selection

SHOWN = 5
"""Tasks that the summary names for one reason; the report names all."""


@dataclass
class Outcome:
    """Everything that the report tells; filled on the way."""

    options: Mapping[str, Any]
    read: int = 0
    """Tasks of the list, bad rows included."""
    bad_rows: list[RowProblem] = field(default_factory=list)
    bad_tasks: int = 0
    """Rows left out for a fault; one row can have several."""
    selection: Selection = field(default_factory=Selection)
    written: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by site and split."""
    scored_by: Counter[str] = field(default_factory=Counter)
    answers_not_used: int = 0
    sites: dict[str, str] = field(default_factory=dict)
    """Site of each task that is left out, by id."""

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return sum(count for (_, of), count in self.written.items() if of == split)

    @property
    def left_out(self) -> dict[str, int]:
        """Tasks left out by reason, in the order of Reason."""
        counts = Counter(note.reason for note in self.selection.left_out)
        counts[Reason.BAD_ROW] += self.bad_tasks
        return {reason.value: counts[reason] for reason in Reason if counts[reason]}

    @property
    def edits(self) -> dict[str, int]:
        """Written tasks by edit, in the order of Edit."""
        counts = Counter(edit for task in self.selection.tasks for edit in task.edits)
        return {edit.value: counts[edit] for edit in Edit if counts[edit]}

    def by_site(self) -> dict[str, dict[str, int]]:
        """Return what became of each site's tasks, sorted by name; of bad rows the site may not even be known."""
        left_out = Counter(self.sites[note.task_id] for note in self.selection.left_out)
        sites = sorted({site for site, _ in self.written} | set(left_out))
        splits = (TRAIN, VALIDATION)
        return {s: {**{of: self.written[s, of] for of in splits}, "left_out": left_out[s]} for s in sites}


def counts(outcome: Outcome) -> dict[str, Any]:
    """Return the report's numbers."""
    dates = outcome.selection.dates
    return {
        "read": outcome.read,
        "written": {split: outcome.rows(split) for split in (TRAIN, VALIDATION)},
        "left_out": outcome.left_out,
        "scored_by": dict(sorted(outcome.scored_by.items())),
        "reference_answers_not_used": outcome.answers_not_used,
        "edits": outcome.edits,
        "shifted": len(outcome.selection.shifted),
        "dates": {name: dates[name] for name in ("dated", "undated", "ambiguous", "relative", "expired")},
    }


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the report."""
    chosen = outcome.selection
    return {
        "options": dict(outcome.options),
        "counts": counts(outcome),
        "sites": outcome.by_site(),
        "bad_rows": [asdict(problem) for problem in outcome.bad_rows],
        "left_out": [_place(n) | {"reason": n.reason.value, "detail": n.text} for n in chosen.left_out],
        "shifted": [_place(s) | _without_place(asdict(s)) for s in chosen.shifted],
        "edited": [_place(t) | {"edits": [e.value for e in t.edits]} for t in chosen.tasks if t.edits],
        "warnings": [_place(n) | {"text": n.text} for n in chosen.warnings],
    }


def _place(item: Any) -> dict[str, Any]:
    return {"id": item.task_id, "file": item.file, "line": item.line}


def _without_place(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in ("task_id", "file", "line")}


def summary(outcome: Outcome, folder: str) -> str:
    """Return the lines that a person reads."""
    sites = outcome.by_site()
    width = max([len("site"), *(len(site) for site in sites)])
    lines = [f"{'site':{width}}  train    val  left out"]
    for site, of in sites.items():
        lines.append(f"{site:{width}}  {of[TRAIN]:5}  {of[VALIDATION]:5}  {of['left_out']:8}")
    dropped = sum(outcome.left_out.values())
    train, validation = outcome.rows(TRAIN), outcome.rows(VALIDATION)
    lines.append(f"{'all':{width}}  {train:5}  {validation:5}  {dropped:8}   of {outcome.read} tasks read")
    for reason, count in outcome.left_out.items():
        lines.append(f"left out, {reason}: {count}")
        lines += _examples([note for note in outcome.selection.left_out if note.reason == reason])
    scored = ", ".join(f"{by.replace('_', ' ')} {count}" for by, count in sorted(outcome.scored_by.items()))
    lines.append(f"scored by: {scored or 'nothing'}")
    if outcome.answers_not_used:
        lines.append(f"reference answers not used, since a scoring spec decides: {outcome.answers_not_used}")
    dates = ", ".join(f"{name} {count}" for name, count in sorted(outcome.selection.dates.items()) if count)
    lines.append(f"dates: {dates or 'none'}")
    if outcome.selection.shifted:
        lines.append(f"dates moved: {len(outcome.selection.shifted)}")
    lines += [f"edited, {edit}: {count}" for edit, count in outcome.edits.items()]
    if outcome.selection.warnings:
        lines.append(f"warnings: {len(outcome.selection.warnings)}")
        lines += _examples(outcome.selection.warnings)
    lines.append(
        f"written: {folder}/train.jsonl, val.jsonl and report.json, which names every task left out or changed"
    )
    return "\n".join(lines)


def _examples(notes: list[Note]) -> list[str]:
    shown = ["  " + ": ".join(part for part in (_where(n), n.task_id, n.text[:200]) if part) for n in notes[:SHOWN]]
    return shown + ([f"  and {len(notes) - SHOWN} more"] if len(notes) > SHOWN else [])


def _where(note: Note) -> str:
    return note.file if note.line is None else f"{note.file}:{note.line}"
