"""One JSON line for every attempt at a rollout, valid or not: what was asked, what happened, how it was scored.

Rollouts that the environment spoiled never reach verl's own dumps, so this log is the only place that counts them.
"""

import hashlib
import heapq
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from episode_record import (
    SCHEMA_VERSION,
    AttemptOutcome,
    AttemptRecord,
    ObservationRecord,
    TextsLeftOut,
    TurnRecord,
)
from line_file import LineWriter
from secret_masking import Masker

__all__ = ["AttemptRecord", "EpisodeLog", "iter_episodes", "read_episodes"]


TEXT_CHARS = 2000
"""Characters of one observation or reply in a line."""
FIELD_CHARS = 1000
"""Characters of every other text in a line."""
LINE_BYTES = 1 << 20
"""A longer line is written without texts and, if that is not enough, without turns, calls and rows."""
FILE_BYTES = 512 << 20
"""A process whose file has grown to this size leaves the texts out; attempts are logged and counted to the end.

Cutting the old lines off instead would lose the beginning of the training, which every curve starts with.
"""

DEFAULTS = asdict(AttemptRecord())
"""What a key that a line lacks stands for."""

_writers: dict[tuple[Path, int], LineWriter] = {}
"""One for each folder and process: verl builds an agent loop, and so an EpisodeLog, for every rollout."""


class EpisodeLog:
    """The log of this process in a folder; None logs nothing. Never raises: a full disk must not cost a rollout."""

    def __init__(self, folder: Path | None, masker: Masker | None = None) -> None:
        self._writer = _writer(folder) if folder else None
        self._masker = masker or Masker()

    async def append(self, record: AttemptRecord, secrets: Iterable[str] = ()) -> None:
        """Append the record as one line, in a thread; `secrets` are values that the line must not hold."""
        if self._writer is not None:
            await self._writer.append(self._line_maker(record, secrets))

    def write(self, record: AttemptRecord, secrets: Iterable[str] = ()) -> None:
        """Append the record as `append` does, in the caller's thread."""
        if self._writer is not None:
            self._writer.write(self._line_maker(record, secrets))

    def _line_maker(self, record: AttemptRecord, secrets: Iterable[str]) -> Callable[[int], bytes]:
        record.ended_at = time.time()
        masker = self._masker.knowing(secrets)
        return lambda size: _line(record, masker, full=size >= FILE_BYTES)


def _writer(folder: Path) -> LineWriter:
    key = (folder, os.getpid())
    if key not in _writers:
        _writers[key] = LineWriter(folder / f"episodes-{socket.gethostname()}-{os.getpid()}.jsonl")
    return _writers[key]


def _line(record: AttemptRecord, masker: Masker, full: bool) -> bytes:
    """Return the record's line, within LINE_BYTES."""
    line = _encoded(_content(record, masker, TextsLeftOut.FILE_FULL if full else TextsLeftOut.NOTHING))
    if len(line) > LINE_BYTES:
        line = _encoded(_content(record, masker, TextsLeftOut.LINE_TOO_LONG))
    if len(line) > LINE_BYTES:
        bare = replace(record, turn_records=[], call_records=[], row_records=[])
        line = _encoded(_content(bare, masker, TextsLeftOut.LINE_TOO_LONG))
    return line


def _encoded(content: dict[str, Any]) -> bytes:
    # Half a surrogate pair, which a policy can write, becomes the JSON escape that stands for it.
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _content(record: AttemptRecord, masker: Masker, left_out: TextsLeftOut) -> dict[str, Any]:
    """Return the record as JSON's types, every text masked and then cut."""
    content = {key: _field(value, masker) for key, value in vars(record).items()}
    turns = [_turn(turn, masker, left_out) for turn in record.turn_records]
    return content | {
        "start_page": _observation(record.start_page, masker, left_out),
        "turn_records": turns,
        "call_records": [vars(call) for call in record.call_records],
        "row_records": [vars(row) for row in record.row_records],
        "texts_left_out": left_out,
    }


def _turn(turn: TurnRecord, masker: Masker, left_out: TextsLeftOut) -> dict[str, Any]:
    return vars(turn) | {
        "arguments": {key: _field(value, masker) for key, value in turn.arguments.items()},
        "element": _field(turn.element, masker),
        "error": _field(turn.error, masker),
        "observation": _observation(turn.observation, masker, left_out),
        "reply": "" if left_out else cut(masker.mask(turn.reply), TEXT_CHARS),
        "summary": "" if left_out else cut(masker.mask(turn.summary), TEXT_CHARS),
        "reply_chars": turn.reply_chars or len(turn.reply),
    }


def _observation(shown: ObservationRecord | None, masker: Masker, left_out: TextsLeftOut) -> dict[str, Any] | None:
    if shown is None:
        return None
    text = masker.mask(shown.text)
    return {
        "sha256": shown.sha256 or hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest(),
        "chars": shown.chars or len(text),
        "text": "" if left_out else cut(text, TEXT_CHARS),
        "url": _field(shown.url, masker),
    }


def _field(value: Any, masker: Masker) -> Any:
    return cut(masker.mask(value), FIELD_CHARS) if type(value) is str else value


def cut(text: str, chars: int) -> str:
    """Return the text, or its first characters and how long it is."""
    return text if len(text) <= chars else f"{text[:chars]} [cut: {len(text)} characters]"


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
    # A clock that was set back leaves a file whose lines are not in order.
    return sorted(iter_episodes(folder, problems), key=lambda record: record["ended_at"]), problems


def _file_episodes(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of one file."""
    with path.open("rb") as file:  # in binary: text mode and splitlines also break lines inside of texts
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = load_line(line)
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}:{number}: {error}")
                continue
            yield completed(record)


def load_line(line: bytes, parse_constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError if it holds no record; `parse_constant` as json.loads's."""
    record = json.loads(line.decode("utf-8", "replace"), parse_constant=parse_constant)
    if not isinstance(record, dict) or not isinstance(record.get("ended_at"), int | float):
        raise ValueError("no record: a JSON object with `ended_at` is expected")
    return record


def completed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of this or an older schema with every key of this one."""
    if record.get("schema") == SCHEMA_VERSION:
        return {**DEFAULTS, **record}
    outcome = AttemptOutcome.of(record.get("reward"), record.get("failure_kind", ""))
    return {**DEFAULTS, "outcome": str(outcome), **record}
