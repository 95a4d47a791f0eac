"""One JSON line for every attempt at a rollout, valid or not: what was asked, what happened, how it was scored.

Rollouts that the environment spoiled never reach verl's own dumps, so this log is the only place that counts them.
"""

import heapq
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from episode_record import SCHEMA_VERSION, AttemptOutcome, AttemptRecord

__all__ = ["AttemptRecord", "EpisodeLog", "iter_episodes", "read_episodes"]

logger = logging.getLogger(__name__)


class EpisodeLog:
    """Appends records to a file of this process in a folder; never raises: a full disk must not cost a rollout."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / f"episodes-{socket.gethostname()}-{os.getpid()}.jsonl" if folder else None
        self._warned = False

    def write(self, record: AttemptRecord) -> None:
        """Append one line, in one write call, so that a killed process leaves at most one broken line."""
        if self._path is None:
            return
        record.ended_at = time.time()
        line = json.dumps(asdict(record), ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode("utf-8", "surrogatepass"))
        except OSError as error:
            if not self._warned:
                logger.warning("Episodes are not logged to %s: %s", self._path, error)
                self._warned = True


def iter_episodes(folder: Path, problems: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of all processes in order of their end, one line of each file in memory at a time.

    What stands in no key of an older line gets the default of its field. A line that can't be read is left out, and
    `problems` gets a sentence for it.
    """
    problems = [] if problems is None else problems
    files = [_file_episodes(path, problems) for path in sorted(folder.glob("episodes-*.jsonl"))]
    # A process writes its lines in the order of `ended_at`, so merging the files orders all.
    yield from heapq.merge(*files, key=lambda record: record["ended_at"])


def read_episodes(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return all records as `iter_episodes` yields them, and its sentences about lines that can't be read."""
    problems: list[str] = []
    return list(iter_episodes(folder, problems)), problems


def _file_episodes(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of one file."""
    with path.open("rb") as file:  # in binary: text mode and splitlines also break lines inside of texts
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8", "replace"))
                if not isinstance(record, dict) or not isinstance(record.get("ended_at"), int | float):
                    raise ValueError("no record: a JSON object with `ended_at` is expected")
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}:{number}: {error}")
                continue
            yield _completed(record)


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of this or an older schema with every key of this one."""
    if record.get("schema") == SCHEMA_VERSION:
        return record
    outcome = AttemptOutcome.of(record.get("reward"), record.get("failure_kind", ""))
    return {**asdict(AttemptRecord()), "outcome": str(outcome), **record}
