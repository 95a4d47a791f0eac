"""What ends a job before its time: Ctrl-C in an allocation, scancel, a more urgent job. None of it needs a training."""

import time

import pytest

from cpu.training_run import REPO_ROOT
from tests.slurm.jobs import POLL_S, stand_in_python

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("nothing_is_left")]

NEVER_ENDS = 'touch "$NEMO_GYM_BROWSER_EPISODE_LOG_DIR.begun.${SLURM_RESTART_COUNT:-0}"; exec sleep 600'


def until(what, timeout_s: float = 60.0) -> None:
    """Return once it is so. Raises AssertionError when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not so after {timeout_s:g} s"
        time.sleep(POLL_S)


def test_ctrl_c_in_an_allocation_stops_every_step(rehearsal, cluster, tmp_path):
    python, log = stand_in_python(tmp_path, NEVER_ENDS), tmp_path / "salloc.log"
    script = ("bash", REPO_ROOT / "submit_webvoyager.sh", "--config-env", rehearsal.settings)
    settings = ("env", f"TRAIN_PYTHON={python}", "RUN_NAME=interrupted")
    program = cluster.spawn(
        "salloc", "--partition=train", "--nodes=1", "--gres=gpu:1", *settings, *script, log=log, cwd=REPO_ROOT
    )
    run = rehearsal.folder / "results" / "interrupted"
    until((run / "episodes.begun.0").exists)
    (pid,) = [pid for pid, line in cluster.processes().items() if line.startswith("bash ") and "submit_web" in line]
    cluster.run("kill", "-INT", str(pid))
    assert program.wait(60) == 130
    said = log.read_text()
    assert "signal INT while: preflight" in said and "exit code 130" in said
    assert not (run / "job.lock").exists()


@pytest.mark.parametrize("partition", ["train", "grace"])
def test_a_preempted_job_goes_back_into_the_queue_and_starts_again(rehearsal, cluster, tmp_path, partition):
    name = f"preempted-{partition}"
    job = rehearsal.submit(
        name,
        options=(f"--partition={partition}", "--nodes=1"),
        TRAIN_PYTHON=str(stand_in_python(tmp_path, NEVER_ENDS)),
        REQUEUE="1",
    )
    job.wait_until((job.run / "episodes.begun.0").exists, 60)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nexit 0\n")
    assert (
        cluster.wait(cluster.submit(urgent, "--partition=urgent", "--nodes=2", "--exclusive", cwd=tmp_path)).exit_code
        == 0
    )
    until((job.run / "episodes.begun.1").exists, 90)
    assert cluster.jobs(job.job_id)[0]["Restarts"] == "1"
    assert "attempt 1, nodes" in job.said()
    cluster.cancel(job.job_id)
    assert job.wait(60).state == "CANCELLED"


def test_a_ray_that_is_deaf_to_term_dies_with_its_job(rehearsal, cluster, tmp_path):
    deaf = 'case "$*" in *ray.scripts*) trap "" TERM; touch "$NEMO_GYM_BROWSER_EPISODE_LOG_DIR.ray"; sleep 600 ;; esac'
    job = rehearsal.submit("deaf", options=("--nodes=1",), TRAIN_PYTHON=str(stand_in_python(tmp_path, deaf)))
    job.wait_until((job.run / "episodes.ray").exists, 120)
    cluster.cancel(job.job_id)
    assert job.wait(25).state == "CANCELLED"  # before UnkillableStepTimeout, which drains the node
