"""What the benchmarks that train share: one training after another, each with its result in a file of its own.

A run whose file is there is not run again, so a sweep can be stopped and started. Each run is verl's real trainer on
the CPU (configs/cpu_practice.yaml).
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cpu.training_run import REPO_ROOT, RunFolder, TrainingRun
from whole_file import write_whole

# The fake environment needs no protection; the real one gets what the demo gives it.
WIDE_OPEN = {"NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "64", "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS": "64"}


class Named(Protocol):
    """A run of a sweep."""

    @property
    def name(self) -> str:
        """Name of the result's file."""


def build_policy(folder: Path, seed: int, options: Sequence[str] = ()) -> Path:
    """Return the folder of the warm-started policy of a seed, built with these options if it is not there."""
    policy = folder / "-".join(["policy", *(option.strip("-") for option in options), f"seed{seed}"])
    command = [sys.executable, "-m", "cpu.small_policy", "--output", str(policy), "--seed", str(seed), *options]
    subprocess.run(command, cwd=REPO_ROOT, check=True)
    return policy


def new_folder(name: str, runs: Path) -> RunFolder:
    """Return a new folder for a run."""
    folder = RunFolder(runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.train_rows.parent.mkdir(parents=True)
    return folder


def train(training: TrainingRun, name: str) -> None:
    """Return when the training has succeeded; nothing of it is left running. Raises RuntimeError if it fails."""
    try:
        training.start()
        while training.tree.exit_code is None:
            time.sleep(1)
        if training.tree.exit_code != 0:
            raise RuntimeError(f"{name}: {training.tree.log_tail()} (log: {training.folder.log})")
    finally:
        training.stop()


def run_missing(wanted: Mapping[str, Named], results: Path, run: Callable[[Named], dict]) -> int:
    """Run what has no result yet, in this order; return 0, 1 if a run failed, or 130 if it was stopped.

    `run` returns a run's result, whose `curve` has a point with `success` and `se` for each validation.
    """
    # As in cpu/demo.py: a run that is stopped must not leave its training behind, in the background of a shell either.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    results.mkdir(parents=True, exist_ok=True)
    for number, (name, condition) in enumerate(wanted.items(), 1):
        path = results / f"{name}.json"
        if path.exists():
            print(f"[{number}/{len(wanted)}] {name}: done before", flush=True)
            continue
        print(f"[{number}/{len(wanted)}] {name}: running", flush=True)
        try:
            result = run(condition)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped; the same command goes on with the runs that have no result", file=sys.stderr)
            return 130
        write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
        print(f"    {_outcome(result)}", flush=True)
    return 0


def _outcome(result: dict) -> str:
    first, last = result["curve"][0], result["curve"][-1]
    return (
        f"success {first['success']:.3f} -> {last['success']:.3f} ± {last['se']:.3f} "
        f"with {last['valid_rollouts']} valid rollouts, {result['wall_s']} s"
    )


def mean_curve(results: Sequence[dict], x: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return the mean of `x`, mean success, lowest and highest success at each validation that all results have."""
    columns = list(zip(*(result["curve"] for result in results), strict=False))
    xs = [sum(point[x] for point in column) / len(column) for column in columns]
    success = [[point["success"] for point in column] for column in columns]
    return xs, [sum(s) / len(s) for s in success], [min(s) for s in success], [max(s) for s in success]
