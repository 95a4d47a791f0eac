"""The report of a run as one HTML page that needs nothing else: figures, charts, every attempt, some turn by turn."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import report_charts as charts
from report_details import Details, script_json
from report_figures import Attempt, Counts, Part, Period, Rate, RunFigures
from report_log import EpisodeFiles

TEMPLATES = Path(__file__).resolve().parent / "report_templates"
SCRIPTS = ("list.js", "forest.js", "viewer.js")
MOST_TASKS = 200
"""Rows of the table of tasks; the list of episodes knows all."""
MOST_TURNS = 40
"""Of the chart of failures by turn; later ones are counted in its last column."""
QUESTION_CHARS = 200
RANKED = 10
"""Rows of the tables of slowest and costliest episodes."""


@dataclass(frozen=True)
class Report:
    """What a page is made of."""

    run: str
    """The run's name."""
    attempts: Sequence[Attempt]
    """In the order of their ends."""
    figures: RunFigures
    files: EpisodeFiles
    half_lines: Sequence[str]
    details: Details
    sessions: Mapping[str, Mapping[int, float]]
    """Sessions opened, closed and open by step, as the trainer counted them; empty where it did not."""


def render(report: Report) -> str:
    """Return the page; equal logs make equal pages."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"rate": rate_text, "num": number_text, "utc": utc_text, "steps": steps_text}
    script = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # Only this script may run and nothing may be loaded: a second wall behind the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    figures = report.figures
    main = figures.training if figures.training.periods else figures.validation
    return environment.get_template("page.html").render(
        report=report,
        figures=figures,
        main=main,
        charts=_charts(report, main),
        calls=sorted({call for _, call in figures.failures_by_call}),
        kinds=sorted(figures.faults, key=lambda kind: (-figures.total.failures[kind], kind)),
        passing=sorted(figures.passing.items(), key=lambda item: (-item[1], item[0])),
        ranked=_ranked(report.attempts),
        most_tasks=MOST_TASKS,
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=digest,
        index=Markup(script_json(_index(report))),
        texts={index: Markup(text) for index, text in sorted(report.details.texts.items())},
    )


def rate_text(rate: Rate) -> str:
    """Return a share with its 95% interval and counts, such as `0.500 [0.22, 0.78] 4/8`."""
    interval = rate.interval()
    if interval is None:
        return "none"
    return f"{rate.solved / rate.rollouts:.3f} [{interval[0]:.2f}, {interval[1]:.2f}] {rate.solved}/{rate.rollouts}"


def number_text(value: float | None, digits: int = 1) -> str:
    """Return a number with thousands set apart; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}".replace(",", "\u202f")


def utc_text(time_s: float) -> str:
    """Return a Unix time as day and time in UTC."""
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{time_s:g} s of Unix time"


def steps_text(period: Period) -> str:
    """Return the steps of a period, such as `5` or `5–8`."""
    return f"{period.first_step}" + ("" if period.last_step == period.first_step else f"–{period.last_step}")


def _charts(report: Report, main: Part) -> dict[str, Markup]:
    """Return the drawings by name; one that would be empty is missing."""
    figures, drawn = report.figures, {}
    if figures.training.periods:
        drawn["training"] = charts.success_chart(figures.training.periods, "Success over training")
    if figures.validation.periods:
        drawn["validation"] = charts.success_chart(figures.validation.periods, "Success in validations")
    if figures.total.failures:
        steps = [(period.first_step + period.last_step) / 2 for period in figures.periods]
        by_step = {k: [p.counts.failures.get(k, 0) for p in figures.periods] for k in figures.total.failures}
        drawn["failures"] = charts.strips_chart(by_step, steps, "step", "Invalid attempts by kind over the steps")
        last = min(MOST_TURNS, max(turn for _, turn in figures.failures_by_turn))
        by_turn = {kind: [0] * (last + 1) for kind in figures.total.failures}
        for (kind, turn), count in figures.failures_by_turn.items():
            by_turn[kind][min(turn, last)] += count
        title = "Invalid attempts by kind and turn of the episode"
        drawn["turns"] = charts.strips_chart(by_turn, range(last + 1), "turns before the failure", title)
    panels = [
        ("attempts a rollout", [_attempts_a_rollout(p.counts) for p in main.periods]),
        ("turns an attempt", [p.counts.per_attempt(p.counts.turns) for p in main.periods]),
        ("generated tokens an attempt", [p.counts.per_attempt(p.counts.generated_tokens) for p in main.periods]),
        ("prompt tokens an attempt", [p.counts.per_attempt(p.counts.prompt_tokens) for p in main.periods]),
    ]
    drawn["effort"] = charts.means_chart(panels, main.periods, "Attempts, turns and lengths over the steps")
    drawn["time"] = charts.time_chart(main.periods, "Seconds of an attempt over the steps")
    sessions = report.sessions or {"opened": {p.first_step: float(p.counts.sessions) for p in figures.periods}}
    drawn["sessions"] = charts.lines_chart(sessions, "sessions", "Sessions over the steps")
    return {name: Markup(text) for name, text in drawn.items()}


def _attempts_a_rollout(counts: Counts) -> float | None:
    rollouts = counts.valid + counts.invalid + counts.unfinished
    return counts.attempts / rollouts if rollouts else None


def _ranked(attempts: Sequence[Attempt]) -> dict[str, list[tuple[int, Attempt]]]:
    """Return the slowest and the costliest attempts, each with its index."""
    numbered = list(enumerate(attempts))
    return {
        "slowest": sorted(numbered, key=lambda pair: (-pair[1].total_s, pair[0]))[:RANKED],
        "costliest": sorted(numbered, key=lambda pair: (-pair[1].tokens, pair[0]))[:RANKED],
    }


def _index(report: Report) -> dict[str, Any]:
    """Return all attempts as columns: a hundred thousand of them stay a few megabytes, names are held once."""
    tables: dict[str, dict[str, int]] = {name: {} for name in ("split", "task", "uid", "outcome", "kind", "stop")}
    tasks: dict[str, tuple[str, str]] = {}
    columns: dict[str, list[Any]] = {name: [] for name in tables}

    def number(table: str, name: str) -> int:
        return tables[table].setdefault(name, len(tables[table]))

    for a in report.attempts:
        tasks.setdefault(a.task, (a.site, a.question[:QUESTION_CHARS]))
        names = (a.split, a.task, a.uid, a.outcome, a.failure_kind, a.stop_reason)
        for table, name in zip(tables, names, strict=True):
            columns[table].append(number(table, name))
    base = int(report.figures.first_end)
    columns |= {
        "step": [a.step for a in report.attempts],
        "rollout": [a.rollout for a in report.attempts],
        "attempt": [a.attempt for a in report.attempts],
        "final": [int(a.final) for a in report.attempts],
        "reward": [a.reward for a in report.attempts],
        "turns": [a.turns for a in report.attempts],
        "seconds": [round(a.total_s, 1) for a in report.attempts],
        "tokens": [a.tokens for a in report.attempts],
        "ended": [int(a.ended_at) - base for a in report.attempts],
        "file": [a.place.file for a in report.attempts],
        "line": [a.place.line for a in report.attempts],
    }
    return {
        "base": base,
        "names": {name: list(table) for name, table in tables.items()},
        "tasks": [tasks[task] for task in tables["task"]],
        "files": [path.name for path in report.files.paths],
        "columns": columns,
        "details": sorted(report.details.texts),
    }
