"""What became of the rollouts of a step: reports from the agent loops, and the `browser/*` metrics made of them.

A rollout that was left out of the batch leaves no trace in verl, so its report is what counts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rollout_failures import Fault


@dataclass(frozen=True)
class JudgeReport:
    """What the verdict on one attempt took."""

    calls: int
    tokens: int
    """Prompt and completion tokens of all calls, as the endpoint counted them."""
    elapsed_s: float
    unusable: tuple[str, ...]
    """Failure kind of each call that gave no verdict."""


@dataclass(frozen=True)
class AttemptReport:
    """One attempt at a rollout."""

    failure_kind: str
    """Empty for a valid attempt."""
    fault: str
    """Whose doing the failure was; empty for a valid attempt."""
    last_action: str
    """What the policy did last, finish aside, which breaks nothing; if it did nothing, the last call that was made."""
    turns: int
    rows: int = 0
    """Training rows of a valid attempt."""
    compactions: int = 0
    """How often the policy went on in a fresh context."""
    cut_calls: int = 0
    """Model calls that train nowhere because of the limits of rows."""
    judge: JudgeReport | None = None
    """None if the judge was not called."""
    generated_tokens: int = 0
    """Tokens of all replies, those that train nowhere included."""
    generation_s: float = 0.0
    environment_s: float = 0.0
    waiting_s: float = 0.0
    """Seconds spent waiting for a free session or for the environment to come back."""


@dataclass(frozen=True)
class ShownEpisode:
    """A rollout's last attempt as a person reads it, for the trackers' tables of validation episodes."""

    task: str
    """Task id, site and the user's words."""
    episode: str
    """How it ended, an action a line, and the answer."""


@dataclass(frozen=True)
class RolloutReport:
    """One rollout after its last attempt."""

    global_step: int
    uid: str
    """The group: verl's id of the prompt in this step."""
    rollout: int
    """Index of the rollout in its group."""
    reward: float | None
    """What was measured; None for an invalid rollout."""
    attempts: tuple[AttemptReport, ...]
    shown: ShownEpisode | None = None
    """None unless trainer.log_val_generations asks for it."""

    @property
    def valid(self) -> bool:
        """Whether the last attempt was measured."""
        return self.reward is not None

    @property
    def failure_kind(self) -> str:
        """Why the rollout is invalid; empty if it is valid."""
        return "" if self.valid or not self.attempts else self.attempts[-1].failure_kind


@dataclass(frozen=True)
class StepSummary:
    """Counts over the rollouts of one step or one validation."""

    rollouts: int
    valid: int
    reward_over_valid: float | None
    """Mean reward of the valid rollouts; None if there is none."""
    invalid_by_kind: dict[str, int]
    attempts: int
    spoiled_attempts: int
    """Attempts that failed, those of rollouts that a later attempt saved included."""
    environment_failures_after: dict[str, int]
    """Attempts that failed by the environment's fault, by the policy's last action."""
    rows: int
    """Training rows of the valid rollouts."""
    compactions: int
    """Fresh contexts of the valid rollouts, the first of each not counted."""
    cut_calls: int
    """Model calls of the valid rollouts that train nowhere because of the limits of rows."""
    turns: int
    """Turns of the valid rollouts."""
    generated_tokens: int
    """Tokens of the valid rollouts' replies."""
    spoiled_by_kind: dict[str, int]
    """Attempts that failed, by failure kind."""
    generation_s: float
    """Of all attempts, as the two below."""
    environment_s: float
    waiting_s: float
    judged: tuple[JudgeReport, ...] = ()
    """Of all attempts that the judge was called for."""

    @property
    def invalid(self) -> int:
        """Rollouts that stayed invalid after all attempts."""
        return self.rollouts - self.valid

    @property
    def reward_over_all(self) -> float | None:
        """Mean reward with the invalid rollouts counted as not solved; None if none is valid."""
        return None if self.reward_over_valid is None else self.reward_over_valid * self.valid / self.rollouts

    @property
    def invalid_share(self) -> float:
        """Share of invalid rollouts; 0 if there was no rollout."""
        return self.invalid / self.rollouts if self.rollouts else 0.0

    @classmethod
    def of(cls, reports: Iterable[RolloutReport]) -> StepSummary:
        """Return the counts over these reports."""
        reports = list(reports)
        rewards = [report.reward for report in reports if report.reward is not None]
        attempts = [attempt for report in reports for attempt in report.attempts]
        measured = [report.attempts[-1] for report in reports if report.valid and report.attempts]
        blamed_on_environment = [attempt for attempt in attempts if attempt.fault == Fault.ENVIRONMENT]
        return cls(
            rollouts=len(reports),
            valid=len(rewards),
            reward_over_valid=sum(rewards) / len(rewards) if rewards else None,
            invalid_by_kind=dict(Counter(report.failure_kind for report in reports if not report.valid)),
            attempts=len(attempts),
            spoiled_attempts=sum(bool(attempt.failure_kind) for attempt in attempts),
            environment_failures_after=dict(Counter(attempt.last_action for attempt in blamed_on_environment)),
            rows=sum(attempt.rows for attempt in measured),
            compactions=sum(attempt.compactions for attempt in measured),
            cut_calls=sum(attempt.cut_calls for attempt in measured),
            turns=sum(attempt.turns for attempt in measured),
            generated_tokens=sum(attempt.generated_tokens for attempt in measured),
            spoiled_by_kind=dict(Counter(attempt.failure_kind for attempt in attempts if attempt.failure_kind)),
            generation_s=sum(attempt.generation_s for attempt in attempts),
            environment_s=sum(attempt.environment_s for attempt in attempts),
            waiting_s=sum(attempt.waiting_s for attempt in attempts),
            judged=tuple(attempt.judge for attempt in attempts if attempt.judge is not None),
        )

    def metrics(self, prefix: str = "browser") -> dict[str, float]:
        """Return the metrics of a step.

        `environment_failures_after/<action>` is the share of all environment failures that came after that action: a
        share that grows for one action of the policy shows that it learns to break its way out of a rollout.
        """
        metrics = {
            f"{prefix}/rollouts": float(self.rollouts),
            f"{prefix}/rollouts_valid": float(self.valid),
            f"{prefix}/rollouts_invalid": float(self.invalid),
            f"{prefix}/invalid_share": self.invalid_share,
            f"{prefix}/attempts": float(self.attempts),
            f"{prefix}/attempts_spoiled": float(self.spoiled_attempts),
        }
        if self.reward_over_valid is not None:
            metrics[f"{prefix}/reward_over_valid/mean"] = self.reward_over_valid
            metrics[f"{prefix}/reward_over_all/mean"] = self.reward_over_all
            metrics[f"{prefix}/turns_per_rollout/mean"] = self.turns / self.valid
            metrics[f"{prefix}/generated_tokens_per_rollout/mean"] = self.generated_tokens / self.valid
            metrics[f"{prefix}/rows_per_rollout/mean"] = self.rows / self.valid
            metrics[f"{prefix}/compactions_per_rollout/mean"] = self.compactions / self.valid
            metrics[f"{prefix}/cut_calls"] = float(self.cut_calls)
        if self.attempts:
            for part in ("generation", "environment", "waiting"):
                metrics[f"{prefix}/{part}_s_per_attempt/mean"] = getattr(self, f"{part}_s") / self.attempts
        for kind, count in self.spoiled_by_kind.items():
            metrics[f"{prefix}/attempts_spoiled/{kind}"] = float(count)
        for kind, count in self.invalid_by_kind.items():
            metrics[f"{prefix}/invalid_share/{kind}"] = count / self.rollouts
        failures = sum(self.environment_failures_after.values())
        for action, count in self.environment_failures_after.items():
            metrics[f"{prefix}/environment_failures_after/{action}"] = count / failures
        return metrics | self._judge_metrics(f"{prefix}/judge")

    def _judge_metrics(self, prefix: str) -> dict[str, float]:
        """Return the metrics of the judge; none if it was not called."""
        if not self.judged:
            return {}
        calls = sum(judge.calls for judge in self.judged)
        unusable = Counter(kind for judge in self.judged for kind in judge.unusable)
        metrics = {
            f"{prefix}/episodes": float(len(self.judged)),
            f"{prefix}/calls": float(calls),
            f"{prefix}/tokens": float(sum(judge.tokens for judge in self.judged)),
            f"{prefix}/latency_s/mean": sum(judge.elapsed_s for judge in self.judged) / len(self.judged),
            f"{prefix}/latency_s/max": max(judge.elapsed_s for judge in self.judged),
            f"{prefix}/unusable_share": unusable.total() / calls,
        }
        return metrics | {f"{prefix}/unusable_share/{kind}": count / calls for kind, count in unusable.items()}

    def text(self) -> str:
        """Return the counts in words, for a message."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.invalid_by_kind.items()))
        return f"{self.invalid} of {self.rollouts} rollouts invalid" + (f" ({kinds})" if kinds else "")
