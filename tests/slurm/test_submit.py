"""submit_webvoyager.sh as a user submits it: real sbatch, two nodes, real Ray over both, the CPU profile."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpu.processes import kill_all
from cpu.rehearsal import write_rehearsal
from cpu.training_run import REPO_ROOT
from tests.slurm.cluster import JobResult, SlurmCluster

pytestmark = pytest.mark.timeout(900)

SITE = "http://10.77.0.1:8077"
TRAINING_S = 700
POLL_S = 0.5
SECRETS = {"NEMO_GYM_BROWSER_JUDGE_API_KEY": "sk-judge-7f3a", "WANDB_API_KEY": "wandb-91c2"}
SMALL_STEPS = (
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
)


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
            assert self.cluster.state(self.job_id) in ("PENDING", "CONFIGURING", "RUNNING"), self.said()[-4000:]
            assert time.monotonic() < deadline, self.said()[-4000:]
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


@pytest.fixture(scope="module")
def site(cluster: SlurmCluster) -> Iterator[None]:
    """The practice site, beside the controller."""
    log = cluster.folder / "site.log"
    with log.open("wb") as output:
        program = cluster.start("python", "-m", "cpu.practice_site", "serve", "--host", "0.0.0.0", output=output)
        yield
        program.kill()
        program.wait()


@pytest.fixture(scope="module")
def rehearsal(cluster: SlurmCluster, site: None, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """What `python -m cpu.rehearsal` makes, with the policy of the other trainings' tests."""
    policy = REPO_ROOT / "runs" / "policy-for-tests"
    folder = tmp_path_factory.mktemp("rehearsal")
    subprocess.run([REPO_ROOT / ".venv/bin/python", "-m", "cpu.small_policy", "--output", policy], check=True)
    (folder / "policy").symlink_to(policy)
    return Rehearsal(cluster, folder, write_rehearsal(folder, SITE, "rehearsal"))


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SlurmCluster, site: None) -> Iterator[None]:
    """After each test the nodes run what they ran before it: jobs take everything along."""
    before = set(cluster.processes())
    yield
    deadline = time.monotonic() + 20  # Slurm's own KillWait, and its step daemons after it
    while left := {pid: line for pid, line in cluster.processes().items() if pid not in before}:
        if time.monotonic() > deadline:
            kill_all_inside(cluster, left)
            pytest.fail(f"still running after the job: {left}")
        time.sleep(POLL_S)


def kill_all_inside(cluster: SlurmCluster, pids: Mapping[int, str]) -> None:
    """Kill processes by their pids inside the cluster, so that one test's leftovers don't fail the next."""
    cluster.run("kill", "-KILL", *map(str, pids))


def test_settings_with_a_fault_end_the_job_before_anything_starts(rehearsal):
    job = rehearsal.submit("faulty", TRAIN_FILE="", GPUS_PER_NODE="some")
    broken = rehearsal.folder / "broken.env"
    broken.write_text(rehearsal.settings.read_text().replace("TRAIN_FILE", "TRAINFILE"))
    job = rehearsal.submit("faulty", settings=broken, GPUS_PER_NODE="some")
    assert job.wait(60).exit_code == 2
    assert "broken.env: TRAINFILE: no such setting" in job.said() and "TRAIN_FILE is not set" in job.said()
    assert "GPUS_PER_NODE=some: must be a whole number" in job.said()
    assert not job.run.exists()


def test_an_environment_that_is_down_is_said_and_no_training_starts(rehearsal):
    job = rehearsal.submit("down", START_ENVIRONMENT="", NEMO_GYM_URL="http://10.77.0.1:9")
    assert job.wait(300).exit_code == 1
    assert "environment_unreachable" in job.said() and "Start the server" in job.said()
    assert not list(job.log("").glob("ray-*")) and not job.log("train.log").exists()
