"""The state of one attempt at a rollout: its conversation as tokens, its clocks, and how it ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from browser_task import BrowserTask
from environment_session import ActionName, BrowserAction, BrowserSession
from episode_limits import EpisodeLimits
from episode_log import AttemptRecord
from observations import Element
from rollout_failures import Failure, FailureKind, Fault, failure_of
from rollout_stats import AttemptReport
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
    """One attempt. Token lists grow turn by turn; nothing that was generated is ever rendered anew."""

    request_id: str
    sampling_params: dict[str, Any]
    session: BrowserSession | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Prompt and response so far, as the engine saw them."""
    prompt_tokens: int = 0
    response_mask: list[int] = field(default_factory=list)
    """1 for each generated token, 0 for each token of an observation."""
    response_logprobs: list[float] = field(default_factory=list)
    """As long as response_mask, or empty if the engine gives none."""
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
    failure: Failure | None = None
    lost_s: float = 0.0
    """Seconds of the rollout's deadline that its earlier attempts, all spoiled by the environment, have used up."""

    def open(self, messages: list[dict[str, Any]], prompt_ids: list[int]) -> None:
        """Start the conversation with a prompt."""
        self.messages = messages
        self.token_ids = list(prompt_ids)
        self.prompt_tokens = len(prompt_ids)

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

    def add_reply(self, token_ids: list[int], mask: list[int], logprobs: list[float] | None, output: Any) -> None:
        """Take over the tokens with the policy's reply merged in, and the engine's fields."""
        self.turns += 1
        self.token_ids, self.response_mask = token_ids, mask
        self.response_logprobs = logprobs or []
        if output.num_preempted is not None:
            self.num_preempted = max(0, self.num_preempted) + output.num_preempted
        newest = output.extra_fields.get("max_global_steps")
        self.engine_fields = {**output.extra_fields, **self.engine_fields}
        if newest is not None:
            self.engine_fields["max_global_steps"] = newest

    def add_context(
        self, messages: list[dict[str, Any]], token_ids: list[int], mask: list[int], logprobs: list[float] | None
    ) -> None:
        """Take over the conversation and the tokens with an observation merged in."""
        self.messages, self.token_ids, self.response_mask = messages, token_ids, mask
        if self.response_logprobs:
            self.response_logprobs = logprobs or []

    def count_unusable(self, call: UnusableCall) -> None:
        """Count a reply that was no action."""
        self.unusable_calls += 1
        self.consecutive_unusable += 1
        self.actions.append(f"!{call.problem}")

    def count_action(self, action: BrowserAction) -> None:
        """Count an action that is about to run."""
        self.consecutive_unusable = 0
        self.actions.append(str(action.name))
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
        )

    def _last_action(self) -> str:
        done = [action for action in self.actions if not action.startswith("!") and action != ActionName.FINISH]
        return done[-1] if done else self.session.last_call

    def record(self, task: BrowserTask, attempt: int) -> AttemptRecord:
        """Return the attempt's line for the episode log."""
        return AttemptRecord(
            global_step=task.global_step,
            uid=task.uid,
            rollout=task.rollout,
            attempt=attempt,
            task_id=task.task_id,
            split=task.split,
            data_source=task.data_source,
            stop_reason="" if self.failure else str(self.stop_reason),
            reward=None if self.failure else self.reward,
            failure_kind=str(self.failure.kind) if self.failure else "",
            failure_evidence=self.failure.evidence if self.failure else "",
            last_call=self.session.last_call,
            turns=self.turns,
            unusable_calls=self.unusable_calls,
            actions=self.actions,
            answer=self.answer,
            generation_s=round(self.generation_s, 3),
            environment_s=round(self.session.environment_s, 3),
            waiting_s=round(self.session.waiting_s, 3),
            prompt_tokens=self.prompt_tokens,
            response_tokens=len(self.response_mask),
        )
