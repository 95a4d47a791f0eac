"""The sessions that a run opened and closed, as its trainer counted them: an extra beside the episode log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

SESSIONS = {"browser/sessions_opened": "opened", "browser/sessions_closed": "closed", "browser/sessions_open": "open"}
"""verl's metrics of browser_sampler.py, and what the report calls them."""

_CONSOLE = re.compile(r"\bstep:(\d+) - ")
# pprint writes numpy's numbers as `np.float64(2.0)`.
_VALUE = re.compile(r"(?:^| )(browser/sessions_\w+):(?:np\.\w+\()?(-?[0-9.]+(?:e[-+]?\d+)?)")


def read_sessions(run: Path) -> dict[str, dict[int, float]]:
    """Return the values by name and step; empty where the trainer's files hold none.

    Read are verl's metrics files (`metrics*.jsonl`) or, where there is none, what its console logger printed
    (`train.log`, `logs/*/train.log`). A resumed run's values replace those of the run that it resumed.
    """
    files = sorted(run.glob("metrics*.jsonl"))
    found = [entry for path in files for entry in _of_metrics(path)]
    if not found:
        logs = [*sorted(run.glob("train.log")), *sorted(run.glob("logs/*/train.log"))]
        found = [entry for path in logs for entry in _of_console(path)]
    sessions: dict[str, dict[int, float]] = {}
    for step, name, value in found:
        sessions.setdefault(name, {})[step] = value
    return {name: dict(sorted(values.items())) for name, values in sorted(sessions.items())}


def _of_metrics(path: Path) -> Iterator[tuple[int, str, float]]:
    with path.open("rb") as file:
        for line in file:
            if b"browser/sessions_" not in line:
                continue
            try:
                entry = json.loads(line)
                step, data = int(entry["step"]), entry["data"]
                yield from ((step, SESSIONS[key], float(data[key])) for key in SESSIONS if key in data)
            except (ValueError, TypeError, KeyError):
                continue  # a line that is being written right now has no end yet


def _of_console(path: Path) -> Iterator[tuple[int, str, float]]:
    with path.open("rb") as file:
        for line in file:
            if b"browser/sessions_" not in line:
                continue
            text = line.decode("utf-8", "replace")
            step = _CONSOLE.search(text)
            if step is None:
                continue
            for key, value in _VALUE.findall(text):
                if key in SESSIONS:
                    yield int(step[1]), SESSIONS[key], float(value)
