"""What the episode log tells of an attempt's turns, calls and rows, collected while the attempt goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from call_forest import CallRecord, Row
from environment_session import BrowserAction, StepResult
from episode_record import CallKind, ModelCallRecord, ObservationRecord, RowRecord, TurnRecord
from observations import Element
from rollout_failures import page_url


@dataclass
class EpisodeTrace:
    """The turns and calls of one attempt."""

    start_page: ObservationRecord | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    """Mistakes of the replies that were discarded since the last turn."""
    _calls: list[tuple[CallRecord, CallKind, int]] = field(default_factory=list)
    """Each call, what it was for, and its turn."""
    _context_tokens: int = 0
    """Tokens that the last call was given."""
    _reply: str = ""
    """What the last call generated."""

    def start(self, page: str) -> None:
        """Note what the policy is shown first."""
        self.start_page = _observed(page)

    def note_call(self, call: CallRecord, kind: CallKind, turn: int, context_tokens: int, text: str) -> None:
        """Note a model call, the tokens that it was given, and what it generated."""
        self._calls.append((call, kind, turn))
        if kind is CallKind.SUMMARY:
            self.turns[-1] = replace(self.turns[-1], summary=text)
            return
        self._context_tokens, self._reply = context_tokens, text

    def add_turn(
        self, turn: int, action: BrowserAction | None = None, elements: Sequence[Element] = (), mistake: str = ""
    ) -> None:
        """Note a turn whose reply is the last call: an action that is about to run, or a mistake."""
        call = self._calls[-1][0]
        given = {} if action is None else {key: value for key, value in vars(action).items() if value is not None}
        self.turns.append(
            TurnRecord(
                turn=turn,
                action=str(given.pop("name", "")),
                arguments=given,
                element=next(
                    (f"{e.kind}: {e.label}".rstrip() for e in elements if e.id == given.get("element_id")), ""
                ),
                mistake=mistake,
                discarded=self.discarded,
                reply=self._reply,
                call=call.call_id,
                prompt_tokens=self._context_tokens,
                generated_tokens=len(call.response_ids),
                # Discarded replies continue what the turn's own call continues.
                compaction_before=bool(self.turns) and call.parent_id is None,
            )
        )
        self.discarded = []

    def note_step(self, step: StepResult) -> None:
        """Note what the last turn's action led to; before the first turn, that is told by `start`."""
        if self.turns:
            self.turns[-1] = replace(
                self.turns[-1],
                observation=_observed(step.observation) if step.observation else None,
                failure_kind=str(step.failure.kind) if step.failure else "",
                error=step.error or "",
            )

    def note_time(self, generation_s: float, environment_s: float) -> None:
        """Note how long the last turn took."""
        seconds = {"generation_s": round(generation_s, 3), "environment_s": round(environment_s, 3)}
        self.turns[-1] = replace(self.turns[-1], **seconds)

    def call_records(self, rows: Sequence[Row]) -> list[ModelCallRecord]:
        """Return every call, with the index of the row that trains it."""
        owners = {call_id: number for number, row in enumerate(rows) for call_id in trained_ids(row)}
        return [
            ModelCallRecord(
                id=call.call_id,
                parent=call.parent_id,
                turn=turn,
                kind=kind,
                prompt_tokens=len(call.prompt_ids),
                generated_tokens=len(call.response_ids),
                truncated=call.truncated,
                row=owners.get(call.call_id),
            )
            for call, kind, turn in self._calls
        ]

    def row_records(self, rows: Sequence[Row]) -> list[RowRecord]:
        """Return what each row is made of."""
        return [
            RowRecord(
                calls=list(row.call_ids),
                trains=trained_ids(row),
                prompt_tokens=row.prompt_length,
                response_tokens=row.num_tokens - row.prompt_length,
                trained_tokens=row.num_trained_tokens,
            )
            for row in rows
        ]


def trained_ids(row: Row) -> list[str]:
    """Return the ids of the calls that have their loss in this row."""
    return [call.call_id for call, trains in zip(row.calls, row.trains, strict=True) if trains]


def _observed(text: str) -> ObservationRecord:
    return ObservationRecord(text=text, url=page_url(text) or "")
