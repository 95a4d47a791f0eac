"""Recordings of attempts: every HTTP exchange with the environment, one JSON file an attempt, for episode_replay.py.

    {"name": ..., "attempt": {task_id, outcome, failure_kind, ...}, "exchanges": [{"session": "a", "path": ...,
     "request": {...}, "status": 200, "set_cookie": true, "response": {...}, "elapsed_s": 0.12}, ...]}

An exchange without an answer has `unreachable` (the connection was refused), `error` (the client's exception) or
`given_up` in place of status and response; an answer that is no JSON has `text`. Secrets are masked. The exchanges are
of the form that the tests' recordings of the real server have.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from episode_record import AttemptOutcome, AttemptRecord
from exchanges import Exchange
from line_file import PatientThread
from secret_masking import Masker
from whole_file import write_whole

logger = logging.getLogger(__name__)

MOST_FAILED, MOST_OTHERS = 200, 50
"""Recordings that one process makes of attempts that failed, and of others: the first ones."""
FILE_BYTES = 4 << 20
"""A longer recording is not kept."""
_ATTEMPT_KEYS = (
    "global_step uid rollout attempt task_id data_source outcome stop_reason reward failure_kind failure_evidence "
    "last_call turns actions"
).split()


class _Folder:
    """What the recordings of one process in one folder share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.thread = PatientThread(f"recordings in {path}")
        self.made: Counter[bool] = Counter()
        """Recordings by whether the attempt failed."""
        self.warned = False

    def full(self, failed: bool) -> bool:
        """Return whether no more recordings of this kind are made."""
        return self.made[failed] >= (MOST_FAILED if failed else MOST_OTHERS)


_folders: dict[tuple[Path, int], _Folder] = {}
"""By path and process: verl builds an agent loop, and so a Recordings, for every rollout."""


class Recordings:
    """The recordings of this process in a folder; None records nothing. Never raises."""

    def __init__(self, folder: Path | None, masker: Masker | None = None) -> None:
        self._folder = _folder(folder) if folder else None
        self._masker = masker or Masker()

    def new_exchanges(self) -> list[Exchange] | None:
        """Return a list for a session to fill; None if nothing will be kept of it."""
        return None if self._folder is None or (self._folder.full(True) and self._folder.full(False)) else []

    async def keep(
        self, record: AttemptRecord, exchanges: Sequence[Exchange] | None, secrets: Iterable[str] = ()
    ) -> None:
        """Write the recording of an attempt, in a thread, unless there are enough of its kind."""
        folder, failed = self._folder, record.outcome == AttemptOutcome.INVALID
        if folder is None or exchanges is None or folder.full(failed):
            return
        folder.made[failed] += 1
        masker, taken = self._masker.knowing(secrets), list(exchanges)
        await folder.thread.run(lambda: _write(folder, record, taken, masker))


def _folder(path: Path) -> _Folder:
    key = (path, os.getpid())
    if key not in _folders:
        _folders[key] = _Folder(path)
    return _folders[key]


def _write(folder: _Folder, record: AttemptRecord, exchanges: Sequence[Exchange], masker: Masker) -> None:
    try:
        content = recording_of(record, exchanges, masker)
        text = json.dumps(content, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")
        if len(text) > FILE_BYTES:
            raise ValueError(f"{content['name']} would be {len(text)} bytes long, more than {FILE_BYTES}")
        folder.path.mkdir(parents=True, exist_ok=True)
        write_whole(folder.path / f"{content['name']}.json", text)
    except Exception as error:  # noqa: BLE001 - a recording must not cost the rollout, whatever is in it
        if not folder.warned:
            logger.warning("Recordings are missing in %s: %s: %s", folder.path, type(error).__name__, error)
            folder.warned = True


def recording_of(record: AttemptRecord, exchanges: Sequence[Exchange], masker: Masker) -> dict[str, Any]:
    """Return the recording in JSON's types, masked."""
    task = re.sub(r"[^\w.-]+", "_", record.task_id)[:60] or "task"
    end = record.failure_kind or record.outcome
    name = f"step{record.global_step}-{task}-{record.uid[:8]}-r{record.rollout}-a{record.attempt}-{end}"
    content = {
        "name": name,
        "attempt": {key: getattr(record, key) for key in _ATTEMPT_KEYS},
        "exchanges": [_exchange(exchange) for exchange in exchanges],
    }
    return _masked(content, masker)


def _exchange(exchange: Exchange) -> dict[str, Any]:
    told: dict[str, Any] = {"session": "a", "path": exchange.path, "request": dict(exchange.request)}
    if exchange.status is not None:
        told |= {"status": exchange.status, "set_cookie": exchange.set_cookie} | _body(exchange.text)
        if exchange.retry_after is not None:
            told["retry_after"] = exchange.retry_after
    elif "ClientConnectorError" in exchange.error:
        told["unreachable"] = True
    elif exchange.error:
        told["error"] = exchange.error
    else:
        told["given_up"] = True
    if exchange.elapsed_s is not None:
        told["elapsed_s"] = round(exchange.elapsed_s, 3)
    return told


def _body(text: str) -> dict[str, Any]:
    try:
        return {"response": json.loads(text)}
    except (ValueError, RecursionError):  # a proxy's page of HTML, say
        return {"text": text}


def _masked(value: Any, masker: Masker) -> Any:
    if type(value) is str:
        return masker.mask(value)
    if isinstance(value, dict):
        return {key: _masked(item, masker) for key, item in value.items()}
    return [_masked(item, masker) for item in value] if isinstance(value, list | tuple) else value
