"""The state of one attempt at a rollout: its model calls, its clocks, and how it ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from browser_task import BrowserTask
from call_forest import CallForestError, CallStatus, Row, plan_rows, rows_for_verl
from context_policy import action_line
from conversation import Conversation
from environment_session import ActionName, BrowserAction, BrowserSession
from episode_limits import EpisodeLimits
from episode_record import AttemptOutcome, AttemptRecord, CallKind
from episode_trace import EpisodeTrace
from judge import Judgement
from observations import Element
from rollout_failures import Failure, FailureKind, Fault, failure_of
from rollout_stats import AttemptReport, JudgeReport
from row_limits import limit_rows
from secret_masking import is_password
from tool_calls import UnusableCall


class StopReason(StrEnum):
    """Why a valid episode ended. `finished` is the policy's own end; the others cut it short.

    A cut episode is scored as it stands, except `browser_wrecked`: the policy made its browser unusable, nothing is
    left to look at, and the reward is 0. Calling that invalid would let a policy escape from a lost task.
    """

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    UNUSABLE_CALLS = "unusable_calls"
    CONTEXT_FULL = "context_full"
    DEADLINE = "deadline"
    BROWSER_WRECKED = "browser_wrecked"


@dataclass
class Episode:
    """One attempt."""

    request_id: str
    sampling_params: dict[str, Any]
    session: BrowserSession | None = None
    conversation: Conversation = field(default_factory=Conversation)
    trace: EpisodeTrace = field(default_factory=EpisodeTrace)
    """What the episode log tells of each turn and call."""
    typed_secrets: set[str] = field(default_factory=set)
    """Texts that the policy typed where a password is asked for; no log may hold them."""
    started_at: float = field(default_factory=time.time)
    """Unix time."""
    rows: list[Row] = field(default_factory=list)
    """The training rows of a valid attempt, as verl takes them."""
    cut_calls: int = 0
    """Model calls that train nowhere because of the limits of rows."""
    ledger: list[str] = field(default_factory=list)
    """The actions so far, as a fresh context tells of them."""
    observations: list[str] = field(default_factory=list)
    """The start page, and what came back after each action; uncut."""
    page: str = ""
    """The last page that was observed; uncut."""
    page_is_last: bool = False
    """Whether the last observation was a page, and no message about a call that failed."""
    elements: list[Element] = field(default_factory=list)
    """Elements of the last observation, whole even where the policy was shown a cut one."""
    turns: int = 0
    consecutive_unusable: int = 0
    unusable_calls: int = 0
    actions: list[str] = field(default_factory=list)
    answer: str | None = None
    generation_s: float = 0.0
    num_preempted: int = -1
    engine_fields: dict[str, Any] = field(default_factory=dict)
    """The engine's own fields, among them min_global_steps and max_global_steps of the weights used."""
    stop_reason: StopReason | None = None
    reward: float | None = None
    judgement: Judgement | None = None
    """What the judge said of it; None if the judge was not asked."""
    failure: Failure | None = None
    lost_s: float = 0.0
    """Seconds of the rollout's deadline that its earlier attempts, all spoiled by the environment, have used up."""

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the time inside as generation time."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.generation_s += time.monotonic() - started

    def remaining_s(self, limits: EpisodeLimits) -> float:
        """Return the seconds left of the episode deadline; at least 0."""
        return max(0.0, limits.episode_deadline_s - self.used_s)

    @property
    def used_s(self) -> float:
        """Seconds of the episode deadline that are used up, by this attempt and those before it."""
        return self.lost_s + self.generation_s + self.session.environment_s

    @contextmanager
    def timing_turn(self) -> Iterator[None]:
        """Count the time inside as the time of the turn that is added inside, if one is."""
        turns, generation_s, environment_s = self.turns, self.generation_s, self.session.environment_s
        yield
        if self.turns > turns:
            self.trace.note_time(self.generation_s - generation_s, self.session.environment_s - environment_s)

    def add_reply(self, output: Any, status: CallStatus, kind: CallKind, text: str = "") -> None:
        """Record a model call and what it generated, and take over the engine's own fields."""
        fields = output.extra_fields
        newest = fields.get("max_global_steps")
        turn = self.turns if kind is CallKind.SUMMARY else self.turns + 1
        kept, context_tokens = kind is not CallKind.DISCARDED, len(self.conversation.token_ids)
        call = self.conversation.add_reply(
            output.token_ids,
            output.log_probs or None,
            kept=kept,
            status=status,
            finish_reason=output.stop_reason,
            min_global_steps=fields.get("min_global_steps", newest),
            max_global_steps=newest,
        )
        self.trace.note_call(call, kind, turn, context_tokens, text)
        if output.num_preempted is not None:
            self.num_preempted = max(0, self.num_preempted) + output.num_preempted
        self.engine_fields = {**fields, **self.engine_fields}
        if newest is not None:
            self.engine_fields["max_global_steps"] = newest

    def plan(self, limits: EpisodeLimits, prompt_length: int, response_length: int) -> None:
        """Make the training rows of a valid attempt; one whose calls can't be made into rows is invalid."""
        calls = self.conversation
        try:
            scored = calls.kept[-1]
            rows = plan_rows(calls.records, policy=limits.selection_policy, kept=calls.kept, scored=scored)
            limited = limit_rows(
                rows,
                scored,
                max_rows=limits.max_rows_per_rollout,
                max_prompt_tokens=prompt_length,
                max_response_tokens=response_length,
            )
            self.rows = rows_for_verl(limited.rows, scored)
            self.cut_calls = len(limited.cut_ids)
        except CallForestError as error:
            self.failure, self.reward = failure_of(FailureKind.ROWS_NOT_PLANNED, str(error)), None

    def count_unusable(self, call: UnusableCall) -> None:
        """Count a turn whose reply was no action."""
        self.turns += 1
        self.page_is_last = False
        self.unusable_calls += 1
        self.consecutive_unusable += 1
        self.actions.append(f"!{call.problem}")
        self.trace.add_turn(self.turns, mistake=call.problem)

    def count_discarded(self, call: UnusableCall) -> None:
        """Count a reply that was no action and was generated anew."""
        self.unusable_calls += 1
        self.trace.discarded.append(call.problem)

    def count_action(self, action: BrowserAction) -> None:
        """Count a turn whose action is about to run."""
        self.turns += 1
        self.consecutive_unusable = 0
        self.actions.append(str(action.name))
        self.ledger.append(action_line(action, self.elements))
        self.trace.add_turn(self.turns, action, self.elements)
        if action.name is ActionName.TYPE and is_password(self.page, self.elements, action.element_id):
            self.typed_secrets.add(action.text)
        if action.name is ActionName.FINISH:
            self.answer = action.answer

    def check_limits(self, limits: EpisodeLimits) -> None:
        """End the episode if it ran out of turns or time; an end that is set already stays."""
        if self.failure is not None or self.stop_reason is not None:
            return
        if self.turns >= limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
        elif self.remaining_s(limits) <= 0:
            self.end_by_deadline()

    def end_by_deadline(self) -> None:
        """End the episode for lack of time: the policy's own end, unless the environment used up most of the time."""
        environment_s = self.lost_s + self.session.environment_s
        # Without a single reply there is nothing to train on, and it was the engine that used up the time.
        if environment_s > self.generation_s or self.turns == 0:
            evidence = f"environment {environment_s:.1f} s, generation {self.generation_s:.1f} s"
            self.failure = failure_of(FailureKind.EPISODE_DEADLINE, evidence)
        else:
            self.stop_reason = StopReason.DEADLINE

    def end_by_failure(self, failure: Failure) -> None:
        """End the episode for a fatal failure: invalid, unless the policy brought it about."""
        if failure.fault is Fault.POLICY:
            self.stop_reason = StopReason.BROWSER_WRECKED
        else:
            self.failure = failure

    def reward_extra_info(self) -> dict[str, float]:
        """Return the numbers that verl reports beside the reward in validation."""
        return {
            "finished": float(self.stop_reason is StopReason.FINISHED),
            "turns": float(self.turns),
            "unusable_calls": float(self.unusable_calls),
            "compactions": float(self.compactions),
            "generation_s": self.generation_s,
            "environment_s": self.session.environment_s,
        }

    def report(self) -> AttemptReport:
        """Return the attempt as the metrics count it."""
        return AttemptReport(
            failure_kind=str(self.failure.kind) if self.failure else "",
            fault=str(self.failure.fault) if self.failure else "",
            last_action=self._last_action(),
            turns=self.turns,
            rows=len(self.rows),
            compactions=self.compactions,
            cut_calls=self.cut_calls,
            judge=self._judge_report(),
            generated_tokens=sum(len(call.response_ids) for call in self.conversation.records),
            generation_s=self.generation_s,
            environment_s=self.session.environment_s,
            waiting_s=self.session.waiting_s,
        )

    def _judge_report(self) -> JudgeReport | None:
        judged = self.judgement
        if judged is None or not judged.calls:
            return None
        tokens = judged.prompt_tokens + judged.completion_tokens
        return JudgeReport(judged.calls, tokens, judged.elapsed_s, tuple(map(str, judged.unusable)))

    @property
    def compactions(self) -> int:
        """How often the policy went on in a fresh context."""
        return max(0, self.conversation.roots - 1)

    def _last_action(self) -> str:
        done = [action for action in self.actions if not action.startswith("!") and action != ActionName.FINISH]
        return done[-1] if done else self.session.last_call

    def record(self, task: BrowserTask, attempt: int, final: bool) -> AttemptRecord:
        """Return the attempt's line for the episode log; `final`: whether no further attempt follows."""
        reward = None if self.failure else self.reward
        failure_kind = str(self.failure.kind) if self.failure else ""
        return AttemptRecord(
            started_at=self.started_at,
            global_step=task.global_step,
            uid=task.uid,
            rollout=task.rollout,
            attempt=attempt,
            final=final,
            task_id=task.task_id,
            split=task.split,
            data_source=task.data_source,
            site=task.site,
            question=task.question,
            outcome=AttemptOutcome.of(reward, failure_kind),
            stop_reason="" if self.failure else str(self.stop_reason),
            reward=reward,
            failure_kind=failure_kind,
            failure_fault=str(self.failure.fault) if self.failure else "",
            failure_evidence=self.failure.evidence if self.failure else "",
            last_call=self.session.last_call,
            turns=self.turns,
            unusable_calls=self.unusable_calls,
            actions=self.actions,
            answer=self.answer,
            generation_s=round(self.generation_s, 3),
            environment_s=round(self.session.environment_s, 3),
            waiting_s=round(self.session.waiting_s, 3),
            compactions=self.compactions,
            discarded_calls=self.conversation.discarded,
            cut_calls=self.cut_calls,
            rows=len(self.rows),
            prompt_tokens=sum(row.prompt_length for row in self.rows),
            response_tokens=sum(row.num_tokens - row.prompt_length for row in self.rows),
            scored_by="judge" if task.judged else "environment",
            judge_reason=self.judgement.verdict.reason if self.judgement else "",
            judge_calls=self.judgement.calls if self.judgement else 0,
            judge_s=round(self.judgement.elapsed_s, 3) if self.judgement else 0.0,
            start_page=self.trace.start_page,
            turn_records=self.trace.turns,
            call_records=self.trace.call_records(self.rows),
            row_records=self.trace.row_records(self.rows),
        )
