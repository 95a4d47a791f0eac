"""The sessions that a run opened and closed, as its trainer counted them: an extra beside the episode log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from report_log import whole_lines

SESSIONS = {"browser/sessions_opened": "opened", "browser/sessions_closed": "closed", "browser/sessions_open": "open"}
"""verl's metrics of browser_sampler.py, and what the report calls them."""

_CONSOLE = re.compile(r"\bstep:(\d+) - ")
# pprint writes numpy's numbers as `np.float64(2.0)`.
_VALUE = re.compile(r"(?:^| )(browser/sessions_\w+):(?:np\.\w+\()?(-?[0-9.]+(?:e[-+]?\d+)?)")


def read_sessions(run: Path) -> dict[str, dict[int, float]]:
    """Return the values by name and step; empty where the trainer's files hold none."""
    return SessionMetrics(run).read_new()


class SessionMetrics:
    """verl's metrics files (`metrics*.jsonl`) or, where there is none, what its console logger printed.

    That is in `train.log` or `logs/*/train.log`. A resumed run's values replace those of the run that it resumed.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._ends: dict[Path, int] = {}
        self._values: dict[str, dict[int, float]] = {}

    def read_new(self) -> dict[str, dict[int, float]]:
        """Return the values by name and step, whole lines since the last call included."""
        files, read = sorted(self._run.glob("metrics*.jsonl")), _of_metrics
        if not files:
            files, read = (
                [*sorted(self._run.glob("train.log")), *sorted(self._run.glob("logs/*/train.log"))],
                _of_console,
            )
        for path in files:
            for line in self._new_lines(path):
                for step, name, value in read(line):
                    self._values.setdefault(name, {})[step] = value
        return {name: dict(sorted(values.items())) for name, values in sorted(self._values.items())}

    def _new_lines(self, path: Path) -> Iterator[bytes]:
        for line, end in whole_lines(path, self._ends.get(path, 0)):
            self._ends[path] = end
            if b"browser/sessions_" in line:
                yield line


def _of_metrics(line: bytes) -> list[tuple[int, str, float]]:
    try:
        entry = json.loads(line)
        step, data = int(entry["step"]), entry["data"]
        return [(step, SESSIONS[key], float(data[key])) for key in SESSIONS if key in data]
    except (ValueError, TypeError, KeyError):
        return []  # an extra: what can't be read here is missing in one chart


def _of_console(line: bytes) -> list[tuple[int, str, float]]:
    text = line.decode("utf-8", "replace")
    step = _CONSOLE.search(text)
    if step is None:
        return []
    return [(int(step[1]), SESSIONS[key], float(value)) for key, value in _VALUE.findall(text) if key in SESSIONS]
