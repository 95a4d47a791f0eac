"""submit_webvoyager.sh as a user submits it: real sbatch, two nodes, real Ray over both, the CPU profile."""

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpu.rehearsal import write_rehearsal
from cpu.training_run import REPO_ROOT
from tests.slurm.cluster import JobResult, SlurmCluster

pytestmark = pytest.mark.timeout(900)

PYTHON = REPO_ROOT / ".venv/bin/python"
SITE = "http://10.77.0.1:8077"
TRAINING_S = 700
POLL_S = 0.5
END_S = 30  # Slurm's own KillWait, and its step daemons after it
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
    command = (PYTHON, "-m", "cpu.practice_site", "serve", "--host", "0.0.0.0")
    program = cluster.spawn(*command, log=cluster.folder / "site.log", cwd=REPO_ROOT)
    yield
    program.kill()
    program.wait()


@pytest.fixture(scope="module")
def rehearsal(cluster: SlurmCluster, site: None, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """What `python -m cpu.rehearsal` makes, with the policy of the other trainings' tests."""
    policy = REPO_ROOT / "runs" / "policy-for-tests"
    folder = tmp_path_factory.mktemp("rehearsal")
    subprocess.run([PYTHON, "-m", "cpu.small_policy", "--output", policy], cwd=REPO_ROOT, check=True)
    (folder / "policy").symlink_to(policy)
    return Rehearsal(cluster, folder, write_rehearsal(folder, SITE, "rehearsal"))


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SlurmCluster, site: None) -> Iterator[None]:
    """After each test the nodes run what they ran before it: a job takes everything along."""
    before = set(cluster.processes())
    yield
    deadline = time.monotonic() + END_S
    while left := {pid: line for pid, line in cluster.processes().items() if pid not in before}:
        if time.monotonic() > deadline:
            cluster.run("kill", "-KILL", *map(str, left))  # not to fail the next test as well
            pytest.fail(f"still running after the job: {left}")
        time.sleep(POLL_S)


def stand_in_python(folder: Path, shell: str) -> Path:
    """Return a program that does what the shell lines say, then becomes the real Python; for faults on one node."""
    path = folder / "python"
    path.write_text(f'#!/bin/bash\n{shell}\nexec {PYTHON} "$@"\n')
    path.chmod(0o755)
    return path


def test_settings_with_a_fault_end_the_job_before_anything_starts(rehearsal):
    broken = rehearsal.folder / "broken.env"
    broken.write_text(rehearsal.settings.read_text().replace("TRAIN_FILE", "TRAINFILE"))
    job = rehearsal.submit("faulty", settings=broken, GPUS_PER_NODE="some")
    assert job.wait(60).exit_code == 2
    assert "broken.env: TRAINFILE: no such setting" in job.said() and "TRAIN_FILE is not set" in job.said()
    assert "GPUS_PER_NODE=some: must be a whole number" in job.said()
    assert not job.run.exists()


def test_an_environment_that_is_down_is_said_and_no_training_starts(rehearsal):
    elsewhere = rehearsal.folder / "elsewhere.env"
    elsewhere.write_text(rehearsal.settings.read_text().replace("START_ENVIRONMENT='head'\n", ""))
    job = rehearsal.submit("down", settings=elsewhere, NEMO_GYM_URL="http://10.77.0.1:9")
    assert job.wait(300).exit_code == 1
    assert "environment_unreachable at seed" in job.said() and "Nothing takes connections" in job.said()
    assert not list(job.log("").glob("ray-*")) and not job.log("train.log").exists()


def test_a_node_that_never_joins_is_named(rehearsal, tmp_path):
    python = stand_in_python(tmp_path, 'case "$SLURMD_NODENAME $*" in "node2 "*ray.scripts*) exec sleep 600 ;; esac')
    job = rehearsal.submit("lonely", TRAIN_PYTHON=str(python), NODES_TIMEOUT_S="12")
    assert job.wait(300).exit_code == 1
    assert "1 of 2 nodes, 1 of 2 GPUs after 10 s: node2 has not joined" in job.said()
    assert "FAILED: 1 of 2 nodes, 1 of 2 GPUs after 12 s: node2 has not joined" in job.said()
    assert not job.log("train.log").exists()


def test_a_node_that_cannot_import_the_recipe_is_named(rehearsal, tmp_path):
    lost = 'case "$SLURMD_NODENAME $*" in "node2 "*ray.scripts*) unset PYTHONPATH ;; esac'
    job = rehearsal.submit("astray", TRAIN_PYTHON=str(stand_in_python(tmp_path, lost)))
    assert job.wait(400).exit_code == 1
    assert "cluster: node1 ok" in job.said() and "cluster: node2 FAILED" in job.said()
    assert "import browser_agent_loop: ModuleNotFoundError" in job.said()


def test_what_ends_by_itself_ends_the_job_with_its_last_words(rehearsal, tmp_path):
    dies = 'case "$SLURMD_NODENAME $*" in "node1 "*ray.scripts*) echo "no space left"; exit 3 ;; esac'
    job = rehearsal.submit("dying", TRAIN_PYTHON=str(stand_in_python(tmp_path, dies)))
    assert job.wait(300).exit_code == 1
    assert job.said().count("no space left") == 3 and "(exit code 3, start 3 of 3)" in job.said()
    assert "ray-node1 has ended by itself while: start Ray" in job.said()


def test_a_training_that_fails_gives_the_job_its_exit_code(rehearsal):
    job = rehearsal.submit("failing", "actor_rollout_ref.model.path=/no/such/policy")
    assert job.wait().exit_code == 1
    assert "/no/such/policy" in job.log("train.log").read_text()
    assert "no checkpoint was written" in job.said() and "exit code 1 (logs: " in job.said()


def test_a_container_is_asked_for_with_the_mounts_of_the_run(rehearsal, tmp_path):
    seen = tmp_path / "seen"
    python = stand_in_python(tmp_path, f'env | grep ^FAKE_PYXIS >"{seen}"; exit 1')
    job = rehearsal.submit("contained", TRAIN_PYTHON=str(python), CONTAINER_IMAGE="verlai/verl:tag")
    assert job.wait(60).exit_code == 1
    asked = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert asked["FAKE_PYXIS_CONTAINER_IMAGE"] == "verlai/verl:tag"
    assert f"{REPO_ROOT}:{REPO_ROOT}" in asked["FAKE_PYXIS_CONTAINER_MOUNTS"].split(",")


def test_a_run_survives_scancel_and_a_time_limit_and_ends_with_exit_code_0(rehearsal, cluster):
    """Three attempts at one run: cancelled after step 1, saved and requeued in step 2, through steps 3 and 4."""
    with_cpu_node = {"het_options": ("--partition=cpu", "--nodes=1"), "START_ENVIRONMENT": "cpu-nodes"}
    first = rehearsal.submit("whole", "trainer.total_training_steps=9", "trainer.save_freq=1", **with_cpu_node)
    first.wait_until(lambda: first.last_step() >= 1)
    in_ps = "\n".join(cluster.processes().values())
    assert "environment_servers.py" in in_ps and "main_ppo" in in_ps
    assert not any(secret in in_ps for secret in SECRETS.values())
    cluster.cancel(first.job_id)
    assert first.wait(60).state == "CANCELLED"
    saved = first.last_step()
    assert f"the last checkpoint is of step {saved}" in first.said() and "signal TERM while: train" in first.said()
    assert not (first.run / "job.lock").exists()

    last = saved + 3
    second = rehearsal.submit("whole", f"trainer.total_training_steps={last}", "trainer.save_freq=100", REQUEUE="1")
    episodes = first.run / "episodes"
    before = count_lines(episodes)
    second.wait_until(lambda: count_lines(episodes) > before)
    assert f"resumes at step {saved} of" in second.said()
    cluster.cancel(second.job_id, "--signal=USR1", "--batch")
    assert second.wait() == JobResult("COMPLETED", exit_code=0, signal=0, restarts=1)
    assert f"the last checkpoint is of step {saved + 1}" in second.said() and "back into the queue" in second.said()
    assert f"resumes at step {saved + 1} of" in second.said()
    assert second.last_step() == last
    assert (first.run / "checkpoints" / f"global_step_{last}" / "actor").is_dir()
    trained = second.log("train.log", attempt=1).read_text()
    assert [f"step:{step} " in trained for step in range(saved, last + 1)] == [False, False, True, True]
    said = "".join(
        path.read_text(errors="replace") for path in [*first.run.rglob("*.log"), first.output, second.output]
    )
    assert not any(secret in said for secret in SECRETS.values())


def count_lines(folder: Path) -> int:
    """Return how many attempts at a rollout have been logged."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))


def test_two_jobs_of_one_run_do_not_write_at_once(rehearsal, cluster, tmp_path):
    python = stand_in_python(tmp_path, "exec sleep 600")
    holder = rehearsal.submit("shared", options=("--nodes=1",), TRAIN_PYTHON=str(python))
    holder.wait_until(lambda: holder.log("preflight.log").exists(), 60)
    other = rehearsal.submit("shared", options=("--nodes=1",))
    assert other.wait(60).exit_code == 1
    assert f"the run shared belongs to job {holder.job_id}, which is still there" in other.said()
    assert (holder.run / "job.lock").read_text().strip() == str(holder.job_id)
    cluster.cancel(holder.job_id)
    assert holder.wait(60).state == "CANCELLED"
