"""submit_webvoyager.sh as a user submits it: real sbatch, two nodes, real Ray over both, the CPU profile."""

import pytest

from cpu.training_run import REPO_ROOT
from tests.slurm.cluster import JobResult
from tests.slurm.jobs import SECRETS, count_lines, stand_in_python

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("nothing_is_left")]


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


def test_a_node_that_would_train_without_the_patches_is_named(rehearsal, tmp_path):
    lost = 'case "$SLURMD_NODENAME $*" in "node2 "*ray.scripts*) unset PYTHONPATH ;; esac'
    job = rehearsal.submit("astray", TRAIN_PYTHON=str(stand_in_python(tmp_path, lost)))
    assert job.wait(400).exit_code == 1
    assert "cluster: node1 ok" in job.said() and "cluster: node2 FAILED" in job.said()
    assert "Refusing to train" in job.said() and not job.log("train.log").exists()


def test_what_ends_by_itself_ends_the_job_with_its_last_words(rehearsal, tmp_path):
    dies = 'case "$SLURMD_NODENAME $*" in "node1 "*ray.scripts*) echo "no space left"; exit 3 ;; esac'
    job = rehearsal.submit("dying", TRAIN_PYTHON=str(stand_in_python(tmp_path, dies)))
    assert job.wait(300).exit_code == 1
    assert job.said().count("no space left") == 3 and "(exit code 3, start 3 of 3)" in job.said()
    assert "ray-node1 has ended by itself while: start Ray" in job.said()


def test_a_training_that_fails_gives_the_job_its_exit_code(rehearsal, tmp_path):
    fails = 'case "$*" in "-m verl.trainer.main_ppo "*) echo "no luck"; exit 7 ;; esac'
    job = rehearsal.submit("failing", TRAIN_PYTHON=str(stand_in_python(tmp_path, fails)))
    assert job.wait().exit_code == 7
    assert "no luck" in job.log("train.log").read_text()
    assert "no checkpoint was written" in job.said() and "exit code 7 (logs: " in job.said()
    assert not (job.run / "job.lock").exists()


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
