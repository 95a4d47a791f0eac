"""Runs a training of the CPU profile from its start to its end, for tests and whatever they do meanwhile."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cpu.practice_tasks import write_rows
from cpu.training_run import REPO_ROOT, RunFolder, TrainingRun
from tests.practice_environment import TRAIN_SITE, VALIDATION_SITE

TIMEOUT_S = 800


def new_folder(root: Path) -> RunFolder:
    """Return a run's folder with the rows of both practice sites in it."""
    folder = RunFolder(root)
    write_rows(folder.train_rows, folder.root / "data" / "unused.jsonl", TRAIN_SITE)
    write_rows(folder.root / "data" / "unused.jsonl", folder.validation_rows, VALIDATION_SITE)
    return folder


def train_to_the_end(
    folder: RunFolder,
    environment_url: str,
    overrides: Sequence[str],
    settings: Mapping[str, str],
    while_running: Callable[[TrainingRun], None] = lambda training: None,
) -> int:
    """Train the tests' policy and return the exit code; nothing is left running. Raises AssertionError if it hangs."""
    policy = REPO_ROOT / "runs" / "policy-for-tests"
    subprocess.run([sys.executable, "-m", "cpu.small_policy", "--output", policy], cwd=REPO_ROOT, check=True)
    overrides = [f"actor_rollout_ref.model.path={policy}", *overrides]
    training = TrainingRun(folder, environment_url, seed=0, overrides=overrides, extra_environment=settings)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        training.start()
        while training.tree.exit_code is None and time.monotonic() < deadline:
            while_running(training)
            time.sleep(0.5)
        assert training.tree.exit_code is not None, f"still running: {training.tree.log_tail()} (log: {folder.log})"
        return training.tree.exit_code
    finally:
        training.stop()
