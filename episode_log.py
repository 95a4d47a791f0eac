"""One JSON line for every attempt at a rollout, valid or not: what was asked, what happened, how it was scored.

Rollouts that the environment spoiled never reach verl's own dumps, so this log is the only place that counts them.
"""

import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1


@dataclass
class AttemptRecord:
    """One attempt; the fields are the keys of its line."""

    schema: int = SCHEMA_VERSION
    ended_at: float = 0.0
    """Unix time at which the attempt's session was closed."""
    global_step: int = -1
    """The trainer's step at which the prompt was sent out."""
    uid: str = ""
    """The group: verl's id of the prompt in this step."""
    rollout: int = 0
    """Index of the rollout in its group."""
    attempt: int = 1
    task_id: str = ""
    split: str = ""
    data_source: str = ""
    server: str = ""
    """Base address of the environment server that the attempt ran on."""
    stop_reason: str = ""
    """Why the episode ended; empty if the attempt is invalid."""
    reward: float | None = None
    """What was measured; null where nothing was."""
    failure_kind: str = ""
    """Why the attempt is invalid; empty if it is valid."""
    failure_evidence: str = ""
    last_call: str = ""
    """The last call to the environment: seed, observe, navigate, click, type, finish or verify."""
    turns: int = 0
    unusable_calls: int = 0
    actions: list[str] = field(default_factory=list)
    """The action of each turn, or `!` and the mistake's name."""
    answer: str | None = None
    """The policy's answer in its finish call."""
    generation_s: float = 0.0
    environment_s: float = 0.0
    waiting_s: float = 0.0
    """Seconds spent waiting for a free session or for the environment to come back."""
    compactions: int = 0
    """How often the policy went on in a fresh context."""
    discarded_calls: int = 0
    """Replies that were no usable call and were generated anew."""
    cut_calls: int = 0
    """Model calls that train nowhere, because their row would be too long or one too many."""
    rows: int = 0
    """Training rows of a valid attempt."""
    prompt_tokens: int = 0
    """Of all rows."""
    response_tokens: int = 0
    """Of all rows."""
    scored_by: str = ""
    """Who was to score the episode: `environment` or `judge`."""
    judge_reason: str = ""
    """Why the judge decided so, or why its verdict can't be used."""
    judge_calls: int = 0
    judge_s: float = 0.0
    """Seconds until the verdict, waiting for a free call and repetitions included."""


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


def read_episodes(folder: Path) -> tuple[list[dict], list[str]]:
    """Return the records of all processes in order of their end, and a line for each record that can't be read."""
    records, problems = [], []
    for path in sorted(folder.glob("episodes-*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                problems.append(f"{path}:{number}: {error.msg}")
                continue
            records.append(record)
    return sorted(records, key=lambda r: r["ended_at"]), problems
