"""Learning on episodes that do not fit one context: append, which cuts them off, beside window and summary.

python benchmarks/long_episodes/train.py [--policies append window summary] [--seeds 0 1 2] [--steps 12]

Each task orders three items in the practice site's shop: nine turns without a mistake, of which four fit the budget.
Every run is verl's real trainer on the CPU (configs/cpu_practice.yaml) over the fake environment, in which nothing
fails here, from the same warm-started policy of its seed. Results go to one JSON file a run; a run whose file is there
is not run again, so the command can be stopped and started.

The curves: python benchmarks/long_episodes/plot.py
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.runs import WIDE_OPEN, build_policy, new_folder, run_missing, train  # noqa: E402
from context_policy import ContextPolicy  # noqa: E402
from cpu.long_context import ContextLimits  # noqa: E402
from cpu.long_evaluation import success_over_tasks  # noqa: E402
from cpu.long_tasks import make_orders  # noqa: E402
from cpu.practice_tasks import write_rows  # noqa: E402
from cpu.training_run import RunFolder, TrainingRun  # noqa: E402
from episode import StopReason  # noqa: E402
from episode_log import read_episodes  # noqa: E402
from tests.practice_environment import TRAIN_SITE, VALIDATION_SITE, PracticeEnvironment  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
VALIDATE_EVERY = 4


@dataclass(frozen=True)
class Condition:
    """One run of the benchmark."""

    policy: ContextPolicy
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Name of the result's file."""
        return f"{self.policy}-seed{self.seed}"

    @property
    def limits(self) -> ContextLimits:
        """The limits of its episodes: the same for every context policy."""
        return replace(ContextLimits(), policy=self.policy)

    def overrides(self, policy: Path) -> list[str]:
        """Return the Hydra overrides of this run, which trains the policy in this folder."""
        return [
            f"actor_rollout_ref.model.path={policy}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.test_freq={VALIDATE_EVERY}",
            "trainer.save_freq=-1",
            *self.limits.overrides(),
        ]


def run(condition: Condition, runs: Path) -> dict:
    """Return the result of one run. Raises RuntimeError if training fails."""
    policy = build_policy(runs, condition.seed, ["--long-episodes"])
    folder = new_folder(condition.name, runs)
    started = time.monotonic()
    with PracticeEnvironment() as fake:
        unused = folder.root / "data" / "unused.jsonl"
        write_rows(folder.train_rows, unused, TRAIN_SITE, tasks=make_orders)
        write_rows(unused, folder.validation_rows, VALIDATION_SITE, tasks=make_orders)
        overrides = condition.overrides(policy)
        train(TrainingRun(folder, fake.url, condition.seed, overrides, extra_environment=WIDE_OPEN), condition.name)
    wall_s = round(time.monotonic() - started)
    return {**asdict(condition), "limits": asdict(condition.limits), "wall_s": wall_s, **outcome(folder)}


def outcome(folder: RunFolder) -> dict:
    """Return what the episode log says of a run: its learning curve, and how its contexts were used.

    A rollout of several rows counts once, which verl's own dumps of rows would not give.
    """
    episodes, _ = read_episodes(folder.episodes)
    valid = [e for e in episodes if not e["failure_kind"]]
    trained = [e for e in valid if e["split"] != "validation"]
    validated = defaultdict(lambda: defaultdict(list))
    for episode in valid:
        if episode["split"] == "validation":
            validated[episode["global_step"]][episode["uid"]].append(episode["reward"])
    points = []
    for step, rewards in sorted(validated.items()):
        success, standard_error = success_over_tasks(list(rewards.values()))
        used = sum(e["global_step"] <= step for e in trained)
        points.append({"step": step, "valid_rollouts": used, "success": success, "se": standard_error})
    return {
        "rows_per_rollout": _mean([e["rows"] for e in trained]),
        "compactions_per_episode": _mean([e["compactions"] for e in trained]),
        "context_full_share": _mean([e["stop_reason"] == StopReason.CONTEXT_FULL for e in trained]),
        "curve": points,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def main() -> int:
    """Run what has no result yet; return 0, 1 if a run failed, or 130 if it was stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    policies = [str(policy) for policy in ContextPolicy]
    parser.add_argument("--policies", nargs="+", choices=policies, default=policies, help="default: all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of policy and data (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps of a run (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "long_episodes", help="folder of runs and policies"
    )
    options = parser.parse_args()
    # Seeds outermost: a benchmark that is cut short has compared all policies on whole seeds.
    wanted = {
        condition.name: condition
        for seed in options.seeds
        for policy in options.policies
        for condition in [Condition(ContextPolicy(policy), seed, options.steps)]
    }
    return run_missing(wanted, options.results, lambda condition: run(condition, options.runs))


if __name__ == "__main__":
    sys.exit(main())
