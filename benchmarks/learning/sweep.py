"""Learning while rollouts are broken on purpose: this recipe, dropped and flagged, beside failures that count as zeros.

python benchmarks/learning/sweep.py [--rates 0 0.5 0.91] [--methods dropped flagged zeros] [--seeds 0 1 2] [--steps 12]

Each run is verl's real trainer on the CPU (configs/cpu_practice.yaml) over the fake environment, which plays the
practice site without a browser, and in which a share of the training sessions fails at its seed; validation is never
broken. A group gets 6 / (1 - share) rollouts, so that every run sees the same number of valid ones in a step. Results
go to one JSON file a run; a run whose file is there is not run again, so the sweep can be stopped and started.

With --real the environment is NeMo Gym's server with Chromium, behind a proxy that fails the same share of the seeds,
and validation runs at the beginning and the end alone.

The curves: python benchmarks/learning/plot.py
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.runs import WIDE_OPEN, build_policy, new_folder, run_missing, train  # noqa: E402
from cpu.demo_summary import validation_success  # noqa: E402
from cpu.gym_server import GymServer  # noqa: E402
from cpu.practice_site import PracticeServer  # noqa: E402
from cpu.practice_tasks import write_rows  # noqa: E402
from cpu.processes import free_port  # noqa: E402
from cpu.training_run import RunFolder, TrainingRun  # noqa: E402
from episode_log import read_episodes  # noqa: E402
from tests.background import serving  # noqa: E402
from tests.practice_environment import TRAIN_SITE, VALIDATION_SITE, PracticeEnvironment  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
METHODS = ("dropped", "flagged", "zeros")
VALID_ROLLOUTS_PER_GROUP = 6
VALIDATE_EVERY = 3
# A share of failing seeds is what is asked for, no outage.
UNPROTECTED = {"NEMO_GYM_BROWSER_OUTAGE_AFTER_SEEDS": "1000000"}


@dataclass(frozen=True)
class Condition:
    """One run of the sweep."""

    method: str
    rate: float
    """Share of the training rollouts whose seed fails."""
    seed: int
    steps: int
    real: bool = False
    """Whether the environment is the real server."""

    @property
    def name(self) -> str:
        """Name of the result's file; the methods are the same run where nothing fails."""
        return f"{self.method if self.rate else 'nothing-fails'}-{self.rate:g}-seed{self.seed}{'-real' * self.real}"

    def overrides(self, policy: Path) -> list[str]:
        """Return the Hydra overrides of this run."""
        rollouts = round(VALID_ROLLOUTS_PER_GROUP / (1 - self.rate))
        overrides = [
            f"actor_rollout_ref.model.path={policy}",
            f"actor_rollout_ref.rollout.n={rollouts}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.test_freq={self.steps if self.real else VALIDATE_EVERY}",
            "trainer.save_freq=-1",
            "browser.max_attempts=1",
            "trainer.v1.sampler.sampler_kwargs.max_invalid_share=1.0",
            "trainer.v1.sampler.sampler_kwargs.halt_after_steps=1000",
            # Counted without padding: 300 short rows beside long ones would be one dense micro-batch of gigabytes.
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2048",
        ]
        if self.method == "zeros":
            loops = Path(__file__).with_name("agent_loops.yaml")
            overrides += [
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                "algorithm.adv_estimator=grpo",
            ]
        return overrides


@contextlib.contextmanager
def environment(condition: Condition, folder: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Yield the addresses of the environment, of the site to train on and of the site to validate on."""
    if not condition.real:
        with PracticeEnvironment(condition.rate, condition.seed) as fake:
            yield fake.url, TRAIN_SITE, VALIDATION_SITE
        return
    with (
        serving(PracticeServer("127.0.0.1", 0)) as train,
        serving(PracticeServer("127.0.0.1", 0)) as validation,
        GymServer(free_port(), folder.root / "gym_server.log") as gym,
    ):
        module = "benchmarks.learning.broken_seeds"
        command = [sys.executable, "-m", module, gym.url, train.base_url, f"{condition.rate}", f"{condition.seed}"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
            yield proxy.stdout.readline().strip(), train.base_url, validation.base_url
            proxy.stdin.close()


def run(condition: Condition, runs: Path) -> dict:
    """Return the result of one run. Raises RuntimeError if training fails."""
    policy = build_policy(runs, condition.seed)
    folder = new_folder(condition.name, runs)
    started = time.monotonic()
    settings = {"NEMO_GYM_BROWSER_DROP_INVALID": "0" if condition.method == "flagged" else "1", **UNPROTECTED}
    if not condition.real:
        settings |= WIDE_OPEN
    with environment(condition, folder) as (url, train_site, validation_site):
        write_rows(folder.train_rows, folder.root / "data" / "unused.jsonl", train_site)
        write_rows(folder.root / "data" / "unused.jsonl", folder.validation_rows, validation_site)
        overrides = condition.overrides(policy)
        train(TrainingRun(folder, url, condition.seed, overrides, extra_environment=settings), condition.name)
    return {**asdict(condition), "wall_s": round(time.monotonic() - started), "curve": curve(folder)}


def curve(folder: RunFolder) -> list[dict]:
    """Return, for each validation, the valid training rollouts used until then and the success."""
    from benchmarks.learning.failures_as_zeros import SEED_FAILED

    episodes, _ = read_episodes(folder.episodes)
    trained = [
        e["global_step"]
        for e in episodes
        if e["split"] != "validation" and not e["failure_kind"] and e["actions"][:1] != [SEED_FAILED]
    ]
    points = []
    for path in sorted(folder.validations.glob("*.jsonl"), key=lambda p: int(p.stem)):
        step, success = int(path.stem), validation_success(path)
        used = sum(done <= step for done in trained)
        points.append({"step": step, "valid_rollouts": used, "success": success.mean, "se": success.standard_error})
    return points


def main() -> int:
    """Run what has no result yet; return 0, 1 if a run failed, or 130 if it was stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.5, 0.91])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--real", action="store_true", help="the real server and Chromium (quarter of an hour a run)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning")
    options = parser.parse_args()
    # Seeds outermost: a sweep that is cut short has compared all methods on whole seeds.
    wanted = {
        condition.name: condition
        for seed in options.seeds
        for rate in options.rates
        for method in options.methods
        for condition in [Condition(method, rate, seed, options.steps, options.real)]
    }
    return run_missing(wanted, options.results, lambda condition: run(condition, options.runs))


if __name__ == "__main__":
    sys.exit(main())
