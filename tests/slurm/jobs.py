"""Jobs of submit_webvoyager.sh on the tests' Slurm cluster, with the CPU profile."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpu.training_run import REPO_ROOT
from tests.slurm.cluster import JobResult, SlurmCluster

PYTHON = REPO_ROOT / ".venv/bin/python"
SITE = "http://10.77.0.1:8077"
TRAINING_S = 700
POLL_S = 0.5
END_S = 30  # Slurm's own KillWait, and its step daemons after it
SECRETS = {"NEMO_GYM_BROWSER_JUDGE_API_KEY": "sk-judge-7f3a", "WANDB_API_KEY": "wandb-91c2"}
SMALL_STEPS = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2")


@dataclass
class Job:
    """A job that was submitted, and where it writes."""

    cluster: SlurmCluster
    job_id: int
    output: Path
    run: Path

    def said(self) -> str:
        """Return what the job has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, timeout_s: float = TRAINING_S) -> JobResult:
        """Return how the job ended. Raises TimeoutError with what it printed."""
        try:
            return self.cluster.wait(self.job_id, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.said()[-4000:]}") from None

    def wait_until(self, what: Callable[[], object], timeout_s: float = TRAINING_S) -> None:
        """Return once something is so. Raises AssertionError when the job has ended before, or the time has."""
        deadline = time.monotonic() + timeout_s
        while not what():
            job = self.cluster.jobs(self.job_id)[0]
            assert job["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), self.said()[-4000:]
            if time.monotonic() > deadline:
                raise AssertionError(f"after {timeout_s:g} s: {job}\n{self.said()[-4000:]}\n{self.cluster.log_tails()}")
            time.sleep(POLL_S)

    def log(self, name: str, attempt: int = 0) -> Path:
        """Return the path of one of the attempt's logs."""
        return self.run / "logs" / f"job-{self.job_id}-{attempt}" / name

    def last_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        marker = self.run / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(marker.read_text() or 0) if marker.exists() else 0


@dataclass
class Rehearsal:
    """A folder with policy, rows and settings, and the cluster that jobs go to."""

    cluster: SlurmCluster
    folder: Path
    settings: Path

    def submit(
        self,
        name: str,
        *overrides: str,
        options: tuple[str, ...] = (),
        het_options: tuple[str, ...] = (),
        settings: Path | None = None,
        **env: str,
    ) -> Job:
        """Return the job of a run of this name; `env` is set in the environment of sbatch."""
        output = self.folder / f"slurm-{name}-%j.out"
        mine = ("--partition=train", "--gres=gpu:1", "--time=30", f"--output={output}", *options)
        arguments = ("--config-env", str(settings or self.settings), "--", *SMALL_STEPS, *overrides)
        others = (":", *het_options) if het_options else ()
        environment = {"PREFLIGHT_SESSIONS": "2", **SECRETS, **env, "RUN_NAME": name}
        script = REPO_ROOT / "submit_webvoyager.sh"
        job_id = self.cluster.submit(script, *mine, *others, args=arguments, env=environment, cwd=REPO_ROOT)
        run = self.folder / "results" / name
        return Job(self.cluster, job_id, Path(str(output).replace("%j", str(job_id))), run)


def stand_in_python(folder: Path, shell: str) -> Path:
    """Return a program that does what the shell lines say, then becomes the real Python; for faults on one node."""
    path = folder / "python"
    path.write_text(f'#!/bin/bash\n{shell}\nexec {PYTHON} "$@"\n')
    path.chmod(0o755)
    return path


def count_lines(folder: Path) -> int:
    """Return how many attempts at a rollout have been logged."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
