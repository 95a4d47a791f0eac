"""What a demo run achieved, computed from the files that it left."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from cpu.training_run import RunFolder
from episode_log import read_episodes


@dataclass(frozen=True)
class Success:
    """Success on the validation tasks."""

    mean: float
    standard_error: float
    """Of the mean over tasks: samples of one task are not independent, so each task counts once."""
    samples: int
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.standard_error:.3f} ({self.samples} samples of {self.tasks} tasks)"


def validation_success(path: Path) -> Success:
    """Return the success in one of verl's validation dumps. Raises FileNotFoundError if that validation never ran."""
    scores = defaultdict(list)
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        # verl gives each prompt of a validation its own uid; `{uid}_{rollout}_{row}` names a sample.
        scores[sample["uid"].rsplit("_", 2)[0]].append(float(sample["score"]))
    means = [sum(group) / len(group) for group in scores.values()]
    mean = sum(sum(group) for group in scores.values()) / sum(len(group) for group in scores.values())
    spread = sum((m - sum(means) / len(means)) ** 2 for m in means) / max(1, len(means) - 1)
    samples = sum(len(group) for group in scores.values())
    return Success(mean, math.sqrt(spread / len(means)), samples, len(means))


def summarize(folder: RunFolder, wall_s: float) -> dict:
    """Return the figures of a run; the keys are those of `summary.json`."""
    metrics = folder.metrics()
    rewards = {
        step: data["browser/reward_over_valid/mean"]
        for step, data in metrics.items()
        if "browser/reward_over_valid/mean" in data
    }
    episodes, broken_lines = read_episodes(folder.episodes)
    last_step = max(rewards, default=0)
    validations = sorted(int(path.stem) for path in folder.validations.glob("*.jsonl"))
    before = validation_success(folder.validations / "0.jsonl") if 0 in validations else None
    after = validation_success(folder.validations / f"{validations[-1]}.jsonl") if validations[-1:] > [0] else None
    turns = sum(episode["turns"] for episode in episodes)
    span_s = max((e["ended_at"] for e in episodes), default=0.0) - min((e["ended_at"] for e in episodes), default=0.0)
    steps = sorted(rewards)
    return {
        "steps": last_step,
        "validation_before": vars(before) if before else None,
        "validation_after": vars(after) if after else None,
        "validation_gain": after.mean - before.mean if before and after else None,
        "reward_first_five_steps": _mean([rewards[step] for step in steps[:5]]),
        "reward_last_five_steps": _mean([rewards[step] for step in steps[-5:]]),
        "attempts": len(episodes),
        "valid_rollouts": sum(not episode["failure_kind"] for episode in episodes),
        "failures_by_kind": dict(Counter(e["failure_kind"] for e in episodes if e["failure_kind"])),
        "stop_reasons": dict(Counter(e["stop_reason"] for e in episodes if e["stop_reason"])),
        "turns": turns,
        "turns_per_s": turns / span_s if span_s else None,
        "rollout_probs_diff_max": max(
            (data["training/rollout_probs_diff_max"] for data in metrics.values() if _has_diff(data)), default=None
        ),
        "broken_log_lines": broken_lines,
        "wall_s": wall_s,
        "checkpoint": str(folder.checkpoints / f"global_step_{folder.last_checkpoint()}"),
        "rollouts": str(folder.rollouts),
        "episode_log": str(folder.episodes),
    }


def summary_text(figures: dict) -> str:
    """Return the summary as lines for a terminal."""
    failures = ", ".join(f"{kind} {count}" for kind, count in figures["failures_by_kind"].items()) or "none"
    gain = "" if figures["validation_gain"] is None else f"  gain {figures['validation_gain']:+.3f}"
    lines = [
        ("validation before", _success(figures["validation_before"])),
        ("validation after", _success(figures["validation_after"]) + gain),
        ("reward, first 5 steps", _number(figures["reward_first_five_steps"])),
        ("reward, last 5 steps", _number(figures["reward_last_five_steps"])),
        ("episodes", f"{figures['attempts']} attempts, {figures['valid_rollouts']} valid rollouts"),
        ("failures by kind", failures),
        ("turns per second", _number(figures["turns_per_s"])),
        ("wall time", f"{figures['wall_s'] / 60:.1f} min, {figures['steps']} steps"),
        ("checkpoint", figures["checkpoint"]),
        ("rollouts", figures["rollouts"]),
        ("episode log", figures["episode_log"]),
    ]
    return "\n".join(f"  {name:<22} {value}" for name, value in lines)


def _success(figures: dict | None) -> str:
    return str(Success(**figures)) if figures else "not measured"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _has_diff(data: dict) -> bool:
    return "training/rollout_probs_diff_max" in data
