"""What one line of the episode log holds: dataclasses whose fields are the keys; docs/episode_log.md lists them.

Texts are masked (secret_masking.py) and cut (episode_log.py) when a line is written; lengths are those of whole texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 2


class AttemptOutcome(StrEnum):
    """What an attempt came to."""

    SUCCESS = "success"
    """Measured, with a reward of 1 or more."""
    PARTIAL = "partial"
    """Measured, with a reward between 0 and 1."""
    FAILURE = "failure"
    """Measured, with a reward of 0 or less."""
    INVALID = "invalid"
    """Not measured: something failed that is not the policy's doing, or whose effect can't be told from it."""

    @classmethod
    def of(cls, reward: float | None, failure_kind: str = "") -> AttemptOutcome:
        """Return the outcome of an attempt with this reward, None where nothing was measured."""
        if failure_kind or reward is None:
            return cls.INVALID
        if reward >= 1:
            return cls.SUCCESS
        return cls.PARTIAL if reward > 0 else cls.FAILURE


class CallKind(StrEnum):
    """What a model call was for."""

    TURN = "turn"
    """The reply was a turn: an action, or a mistake that the policy was told of."""
    SUMMARY = "summary"
    """The reply is what a fresh context tells of the turns before."""
    DISCARDED = "discarded"
    """The reply was no usable call and was generated anew."""


class TextsLeftOut(StrEnum):
    """Why a line holds no observations and replies; one that is still too long holds no turns, calls and rows."""

    NOTHING = ""
    LINE_TOO_LONG = "line_too_long"
    """The line would be longer than episode_log.LINE_BYTES."""
    FILE_FULL = "file_full"
    """The process's file has grown to episode_log.FILE_BYTES."""


@dataclass(frozen=True)
class ObservationRecord:
    """What came back from the environment."""

    sha256: str = ""
    """Of the whole masked text in UTF-8, in hexadecimal: equal pages have equal digests, whatever is cut."""
    chars: int = 0
    """Length of the whole text."""
    text: str = ""
    """The text's beginning; empty where texts are left out."""
    url: str = ""
    """The page's address; empty if what came back is no page."""


@dataclass(frozen=True)
class TurnRecord:
    """One turn: a reply of the policy, and what it led to."""

    turn: int
    """From 1."""
    action: str
    """observe, navigate, click, type or finish; empty if the reply was no usable call."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The action's arguments that are set: url, element_id, text, answer."""
    element: str = ""
    """The element acted on, kind and label as the policy read them, such as `a: Next page`."""
    mistake: str = ""
    """What was wrong with a reply that was no usable call, such as `broken_json`."""
    discarded: list[str] = field(default_factory=list)
    """Mistakes of the replies before this one that were generated anew."""
    failure_kind: str = ""
    """What failed in the action, also where the episode went on; empty if nothing did."""
    error: str = ""
    """The environment's words for that."""
    observation: ObservationRecord | None = None
    """What came back; null after an error, after finish, and where no action was run."""
    reply: str = ""
    """The beginning of what the policy wrote, thoughts included; empty where texts are left out."""
    reply_chars: int = 0
    """Length of the whole reply."""
    summary: str = ""
    """The beginning of what the policy wrote down after this turn for a fresh context; empty if it did not."""
    call: str | None = None
    """Id of the model call that is this turn."""
    prompt_tokens: int = 0
    """Tokens of the whole context that the call was given."""
    generated_tokens: int = 0
    """Tokens of that call's reply."""
    generation_s: float = 0.0
    """Seconds of all model calls of the turn: discarded replies and a summary after it included."""
    environment_s: float = 0.0
    """Seconds of the action."""
    compaction_before: bool = False
    """Whether the turn began in a fresh context."""


@dataclass(frozen=True)
class ModelCallRecord:
    """One model call: a node of the call forest."""

    id: str
    """Name of the call within the attempt."""
    parent: str | None
    """The call that this one continues; null for the first call of a context."""
    turn: int
    """The turn that it belongs to; a summary belongs to the turn whose observation no longer fitted."""
    kind: CallKind
    """What the call was for."""
    prompt_tokens: int
    """Tokens that the parent did not already hold: all of the context for a call without parent."""
    generated_tokens: int
    """Tokens of its reply."""
    truncated: bool = False
    """Whether the reply was stopped by its length."""
    row: int | None = None
    """Index of the training row that trains it; null if none does."""


@dataclass(frozen=True)
class RowRecord:
    """One training row, in the order in which verl gets them."""

    calls: list[str]
    """Ids of its calls, root first."""
    trains: list[str]
    """Ids of those that have their loss here; the others are context, trained in another row."""
    prompt_tokens: int
    """Tokens of the root's prompt."""
    response_tokens: int
    """Tokens after it."""
    trained_tokens: int
    """Generated tokens that have their loss here."""


@dataclass
class AttemptRecord:
    """One attempt at a rollout; the fields are the keys of its line."""

    schema: int = SCHEMA_VERSION
    """Version of these keys; 1 had neither turns nor calls."""
    started_at: float = 0.0
    """Unix time at which the attempt began to wait for a session; 0 if unknown."""
    ended_at: float = 0.0
    """Unix time at which the line was written: the session was closed and the score known."""
    global_step: int = -1
    """The trainer's step at which the prompt was sent out."""
    uid: str = ""
    """The group: verl's id of the prompt in this step."""
    rollout: int = 0
    """Index of the rollout in its group."""
    attempt: int = 1
    """From 1."""
    final: bool = True
    """Whether no further attempt at this rollout follows: its outcome is the rollout's."""
    task_id: str = ""
    """The dataset's id of the task."""
    split: str = ""
    """The dataset's split: train or validation."""
    data_source: str = ""
    """The dataset's name for where the task is from."""
    site: str = ""
    """Host of the start page; empty for a page of the server's own."""
    question: str = ""
    """The task in the user's words."""
    outcome: AttemptOutcome = AttemptOutcome.INVALID
    """What the attempt came to."""
    stop_reason: str = ""
    """Why the episode ended; empty if the attempt is invalid."""
    reward: float | None = None
    """What was measured; null where nothing was."""
    failure_kind: str = ""
    """Why the attempt is invalid; empty if it is valid."""
    failure_fault: str = ""
    """Whose doing that was."""
    failure_evidence: str = ""
    """The words that showed it."""
    last_call: str = ""
    """The last call to the environment: seed, observe, navigate, click, type, finish or verify."""
    turns: int = 0
    """Replies that joined a context, summaries aside."""
    unusable_calls: int = 0
    """Replies that were no usable call, discarded ones included."""
    actions: list[str] = field(default_factory=list)
    """The action of each turn, or `!` and the mistake's name."""
    answer: str | None = None
    """The policy's answer in its finish call."""
    generation_s: float = 0.0
    """Seconds of all model calls."""
    environment_s: float = 0.0
    """Seconds of all calls to the environment, opening and scoring included."""
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
    """Requests to the judge's endpoint."""
    judge_s: float = 0.0
    """Seconds until the verdict, waiting for a free call and repetitions included."""
    start_page: ObservationRecord | None = None
    """What the policy was shown first; null if no page opened."""
    turn_records: list[TurnRecord] = field(default_factory=list)
    """Every turn."""
    call_records: list[ModelCallRecord] = field(default_factory=list)
    """Every model call, in the order in which they were made."""
    row_records: list[RowRecord] = field(default_factory=list)
    """Every training row of a valid attempt."""
    texts_left_out: TextsLeftOut = TextsLeftOut.NOTHING
    """Why the line holds no observations and replies."""
