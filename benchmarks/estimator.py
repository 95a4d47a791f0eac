"""What the env-aware estimator costs over verl's: all of them over the same batches, in one run.

python benchmarks/estimator.py [--rows 512 8192 65536] [--repeats 7] [--response-length 64] [--group-size 8]
                               [--threads N] [--shuffled]

`ours` gets what verl's get; `with flags` gets env_invalid, rollout_id and row_index too, as in training. Every repeat
runs all estimators, in a new order, over a batch with labels of its own: a string keeps its hash once it is computed.
Printed per number of rows: medians in milliseconds, and the ratios of `ours` and of `with flags` to verl's `grpo` and
`grpo_vectorized`, medians of the repeats' own ratios. A ratio below 1 means faster than verl's.
"""

import argparse
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from group_stats import compute_grpo_env_aware_advantage  # noqa: E402

VERLS = {"grpo": compute_grpo_outcome_advantage, "grpo_vectorized": compute_grpo_vectorized_outcome_advantage}
OURS = ("ours", "with flags")


def batch(rows: int, response_length: int, group_size: int, shuffled: bool) -> tuple[dict, dict]:
    """Return what every estimator gets and the flags of `with flags`: one row a rollout, 1 in 10 of them flagged."""
    uids = [str(uuid.uuid4()) for _ in range(-(-rows // group_size))]
    order = np.random.permutation(rows) if shuffled else np.arange(rows)
    rewards = torch.zeros(rows, response_length)
    rewards[:, -1] = torch.randint(0, 2, (rows,)).float()
    # A string object for each row, as rows bring them that were read from storage one by one.
    labels = [uids[row // group_size].encode().decode() for row in order]
    arguments = {
        "token_level_rewards": rewards,
        "response_mask": torch.randint(0, 2, (rows, response_length)),
        "index": np.array(labels, dtype=object),
    }
    flags = {
        "env_invalid": np.random.random(rows) < 0.1,
        "rollout_id": np.array([f"{uids[row // group_size]}_{row % group_size}" for row in order], dtype=object),
        "row_index": np.zeros(rows, dtype=np.int64),
    }
    return arguments, flags


def seconds(estimator: Callable, arguments: dict) -> float:
    """Return how long the estimator takes."""
    started = time.perf_counter()
    estimator(**arguments)
    return time.perf_counter() - started


def measure(rows: int, repeats: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each repeat, by estimator; a first round, over a small batch, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in (*OURS, *VERLS)}
    for repeat in range(-1, repeats):
        size = rows if repeat >= 0 else 64
        for name in random.sample(list(times), len(times)):
            # The labels that one estimator has hashed must not speed up the next.
            arguments, flags = batch(size, options.response_length, options.group_size, options.shuffled)
            estimator = VERLS.get(name, compute_grpo_env_aware_advantage)
            taken = seconds(estimator, arguments | flags if name == "with flags" else arguments)
            if repeat >= 0:
                times[name].append(taken)
    return times


def main() -> int:
    """Run the benchmark and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 8192, 65536])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--threads", type=int, help="threads of torch; its own choice if not given")
    parser.add_argument("--shuffled", action="store_true", help="groups in no order")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"threads {torch.get_num_threads()}, group size {options.group_size}, {options.repeats} repeats")
    pairs = [(ours, verls) for ours in OURS for verls in VERLS]
    header = [f"{name} ms" for name in (*OURS, *VERLS)] + [f"{ours} / {verls}" for ours, verls in pairs]
    print("  ".join(["  rows", *header]))
    for rows in options.rows:
        times = measure(rows, options.repeats, options)
        cells = [f"{1000 * statistics.median(times[name]):.3f}" for name in (*OURS, *VERLS)]
        for ours, verls in pairs:
            ratios = [own / other for own, other in zip(times[ours], times[verls], strict=True)]
            cells.append(f"{statistics.median(ratios):.3f}")
        line = [f"{cell:>{len(title)}}" for cell, title in zip(cells, header, strict=True)]
        print("  ".join([f"{rows:>6}", *line]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
