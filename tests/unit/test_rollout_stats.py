"""Counting rollouts, attempts and failures of a step."""

import pytest

from rollout_failures import TRAITS, FailureKind
from rollout_stats import AttemptReport, JudgeReport, RolloutReport, StepSummary


def failed(kind: FailureKind, last_action: str = "seed") -> AttemptReport:
    return AttemptReport(str(kind), str(TRAITS[kind].fault), last_action, 0)


VALID = AttemptReport("", "", "verify", 3, rows=2, compactions=1, cut_calls=3)


def report(reward: float | None, *attempts: AttemptReport) -> RolloutReport:
    return RolloutReport(4, "group", 0, reward, attempts)


REPORTS = [
    report(1.0, VALID),
    report(0.0, failed(FailureKind.SESSION_LOST, "click"), VALID),
    report(None, failed(FailureKind.SEED_TIMEOUT), failed(FailureKind.BROWSER_DIED, "click")),
    report(None, failed(FailureKind.TASK_DATA_ERROR, "verify")),
]


def test_invalid_rollouts_neither_count_as_zeros_nor_vanish():
    summary = StepSummary.of(REPORTS)
    assert (summary.rollouts, summary.valid, summary.invalid) == (4, 2, 2)
    assert summary.reward_over_valid == 0.5
    assert summary.invalid_share == 0.5
    assert summary.invalid_by_kind == {"browser_died": 1, "task_data_error": 1}


def test_attempts_count_also_where_a_later_one_saved_the_rollout():
    summary = StepSummary.of(REPORTS)
    assert (summary.attempts, summary.spoiled_attempts) == (6, 4)


def test_the_action_before_an_environment_failure_is_counted_and_other_faults_are_not():
    metrics = StepSummary.of(REPORTS).metrics()
    shares = {k: v for k, v in metrics.items() if k.startswith("browser/environment_failures_after/")}
    assert shares == {
        "browser/environment_failures_after/click": pytest.approx(2 / 3),
        "browser/environment_failures_after/seed": pytest.approx(1 / 3),
    }


def test_metrics_name_the_share_of_each_kind_among_all_rollouts():
    metrics = StepSummary.of(REPORTS).metrics("browser/val")
    assert metrics["browser/val/invalid_share/browser_died"] == 0.25
    assert metrics["browser/val/reward_over_valid/mean"] == 0.5
    assert all(isinstance(value, float) for value in metrics.values())


def test_rows_and_fresh_contexts_are_those_of_the_valid_rollouts():
    spoiled = AttemptReport("session_lost", "environment", "click", 3, rows=9, compactions=9, cut_calls=9)
    single = AttemptReport("", "", "click", 3, rows=1)
    metrics = StepSummary.of([report(1.0, spoiled, VALID), report(0.0, single), report(None, spoiled)]).metrics()
    names = ("rows_per_rollout/mean", "compactions_per_rollout/mean", "cut_calls")
    assert [metrics[f"browser/{name}"] for name in names] == [1.5, 0.5, 3.0]


def test_a_step_without_a_valid_rollout_has_no_mean_reward():
    summary = StepSummary.of(REPORTS[2:])
    assert summary.reward_over_valid is None
    assert not any("reward" in name for name in summary.metrics())
    assert summary.text() == "2 of 2 rollouts invalid (browser_died 1, task_data_error 1)"


def test_both_rates_attempts_turns_tokens_and_times_are_told():
    spoiled = AttemptReport("session_lost", "environment", "click", 9, generated_tokens=99, waiting_s=6.0)
    good = AttemptReport("", "", "click", 4, generated_tokens=50, generation_s=2.0, environment_s=1.0)
    metrics = StepSummary.of([report(1.0, spoiled, good), report(0.0, good), report(None, spoiled)]).metrics()
    told = {
        "reward_over_valid/mean": 0.5,
        "reward_over_all/mean": pytest.approx(1 / 3),
        "rollouts": 3.0,
        "rollouts_valid": 2.0,
        "attempts": 4.0,
        "attempts_spoiled": 2.0,
        "attempts_spoiled/session_lost": 2.0,
        "turns_per_rollout/mean": 4.0,
        "generated_tokens_per_rollout/mean": 50.0,
        "generation_s_per_attempt/mean": 1.0,
        "environment_s_per_attempt/mean": 0.5,
        "waiting_s_per_attempt/mean": 3.0,
    }
    assert {name: metrics[f"browser/{name}"] for name in told} == told


def test_no_report_is_no_failure():
    assert StepSummary.of([]).invalid_share == 0.0


def test_judges_calls_are_counted_over_all_attempts_and_its_failures_by_kind():
    once = AttemptReport("", "", "click", 3, rows=1, judge=JudgeReport(1, 900, 2.0, ()))
    thrice = AttemptReport("judge_truncated", "", "click", 3, judge=JudgeReport(3, 2700, 9.0, ("judge_truncated",) * 3))
    metrics = StepSummary.of([report(1.0, once), report(None, thrice), report(0.0, VALID)]).metrics()
    assert {k: v for k, v in metrics.items() if k.startswith("browser/judge/")} == {
        "browser/judge/episodes": 2.0,
        "browser/judge/calls": 4.0,
        "browser/judge/tokens": 3600.0,
        "browser/judge/latency_s/mean": 5.5,
        "browser/judge/latency_s/max": 9.0,
        "browser/judge/unusable_share": 0.75,
        "browser/judge/unusable_share/judge_truncated": 0.75,
    }


def test_without_a_judge_there_are_no_metrics_of_one():
    assert not [name for name in StepSummary.of(REPORTS).metrics() if "judge" in name]
