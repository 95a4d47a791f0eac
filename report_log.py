"""The episode log of a run as its report reads it: every whole line once, also while it grows, or one line again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from episode_log import DEFAULTS, completed, load_line
from episode_record import AttemptOutcome, AttemptRecord

MOST_PROBLEMS = 100
"""Sentences kept about lines that can't be read; further ones are only counted."""

_TEXTS = {f.name for f in fields(AttemptRecord) if isinstance(DEFAULTS[f.name], str)}
_NUMBERS = {f.name for f in fields(AttemptRecord) if type(DEFAULTS[f.name]) in (int, float)} - {"schema"}
_LISTS = {f.name for f in fields(AttemptRecord) if isinstance(DEFAULTS[f.name], list)}


class NoEpisodesError(Exception):
    """There is no episode log where one was looked for; says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line stands."""

    file: int
    """Index in `EpisodeFiles.paths`."""
    line: int
    """From 1."""
    offset: int
    """Of its first byte in the file."""
    length: int
    """Bytes, the line's end included."""


def find_episodes(run: Path, episodes: Path | None = None) -> Path:
    """Return the folder of a run's episode log. Raises NoEpisodesError if neither place holds one."""
    candidates = [episodes] if episodes else [run / "episodes", run]
    for folder in candidates:
        if any(folder.glob("episodes-*.jsonl")):
            return folder
    looked = " or ".join(str(folder) for folder in candidates)
    raise NoEpisodesError(
        f"no episodes-*.jsonl in {looked}; training writes them once attempts end, into the folder that "
        "NEMO_GYM_BROWSER_EPISODE_LOG_DIR names (another folder: --episodes DIR)"
    )


class EpisodeFiles:
    """The files of an episode log. Each call of `new_records` goes on where the one before ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []
        self.problems: list[str] = []
        """A sentence for each line that can't be read, at most MOST_PROBLEMS."""
        self.unreadable = 0
        """Lines that can't be read."""
        self.last_write: list[float] = []
        """For each file, the newest `ended_at` that it holds; 0 if it holds none."""
        self._ends: list[tuple[int, int]] = []
        """For each file, offset and number of the last line that was read."""

    def new_records(self, progress: Callable[[int], None] | None = None) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yield the records of whole lines that were not read before, file by file, with every key of this schema.

        `progress` is told the bytes of each line. A line without its end is left for the next call.
        """
        known = set(self.paths)
        for path in sorted(self.folder.glob("episodes-*.jsonl")):
            if path not in known:
                self.paths.append(path)
                self._ends.append((0, 0))
                self.last_write.append(0.0)
        for file, path in enumerate(self.paths):
            yield from self._new_of(file, path, progress)

    def _new_of(
        self, file: int, path: Path, progress: Callable[[int], None] | None
    ) -> Iterator[tuple[Place, dict[str, Any]]]:
        offset, number = self._ends[file]
        for line, end in whole_lines(path, offset):
            number += 1
            place = Place(file, number, end - len(line), len(line))
            self._ends[file] = (end, number)
            if progress:
                progress(len(line))
            if not line.strip():
                continue
            try:
                record = read_line(line)
            except (ValueError, OverflowError, RecursionError) as error:
                self.add_problem(f"{path.name}:{place.line}: {error}")
                continue
            self.last_write[file] = max(self.last_write[file], record["ended_at"])
            yield place, record

    def add_problem(self, sentence: str) -> None:
        """Count a line that can't be read and keep the sentence about it, as long as there is room."""
        self.unreadable += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(sentence)

    def half_lines(self) -> list[str]:
        """Return a sentence for each file that ends in half a line: being written, or left by a process that died."""
        sentences = []
        for path, (offset, number) in zip(self.paths, self._ends, strict=True):
            left = path.stat().st_size - offset
            if left > 0:
                sentences.append(f"{path.name}:{number + 1}: {left} bytes without the line's end")
        return sentences

    def unread_bytes(self) -> int:
        """Return how much `new_records` would read now."""
        total = sum(path.stat().st_size for path in self.folder.glob("episodes-*.jsonl"))
        return max(0, total - sum(offset for offset, _ in self._ends))

    def record_at(self, place: Place) -> dict[str, Any]:
        """Return the record of a line that was read before."""
        with self.paths[place.file].open("rb") as file:
            file.seek(place.offset)
            return read_line(file.read(place.length))


def whole_lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines from this byte on, each with the offset of its end; a last one without its end is left out."""
    with path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset


def read_line(line: bytes) -> dict[str, Any]:
    """Return a line's record, its missing keys filled with their defaults. Raises ValueError if it holds no record."""
    record = load_line(line, parse_constant=_refuse_constant)
    _check_types({**DEFAULTS, **record})
    return completed(record)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_types(record: dict[str, Any]) -> None:
    """Raise ValueError naming a key whose value is of another type than this schema's: figures would go wrong."""
    for names, types in ((_TEXTS, str), (_NUMBERS, int | float), (_LISTS, list)):
        for name in names:
            if not isinstance(record[name], types):
                raise ValueError(f"{name} is {str(record[name])[:40]!r}, which is no {_WORDS[types]}")
    reward = record["reward"]
    if reward is not None and not isinstance(reward, int | float):
        raise ValueError(f"reward is {str(reward)[:40]!r}, which is no number")
    if not all(math.isfinite(record[name]) for name in _NUMBERS) or not math.isfinite(reward or 0):
        raise ValueError("a number is infinite")
    if record["outcome"] not in _OUTCOMES:
        raise ValueError(f"outcome is {record['outcome'][:40]!r}; known are {', '.join(sorted(_OUTCOMES))}")
    for name in ("turn_records", "call_records", "row_records"):
        if not all(isinstance(part, dict) for part in record[name]):
            raise ValueError(f"{name} holds something that is no object")


_OUTCOMES = frozenset(str(outcome) for outcome in AttemptOutcome)
_WORDS = {str: "text", int | float: "number", list: "list"}
