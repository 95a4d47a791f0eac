"""The cluster of these tests behaves as a real one does: what a submit script relies on."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from cpu.processes import command_line, parents
from tests.slurm import cluster as cluster_module
from tests.slurm.cluster import NODES, ClusterError, JobResult, SlurmCluster

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def script(tmp_path: Path):
    """Return a function that writes a batch script and returns its path."""

    def write(body: str) -> Path:
        path = tmp_path / "job.sh"
        path.write_text(f"#!/bin/bash\n{body}\n")
        return path

    return write


def output_option(folder: Path) -> str:
    """Return the option that sends a job's output to output.txt, which is added to when the job runs again."""
    return f"--output={folder}/output.txt"


def wait_for_text(path: Path, text: str, timeout_s: float = 20.0) -> None:
    """Return once the file holds the text; fail with what it holds."""
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in {path.read_text() if path.exists() else 'no file'}"
        time.sleep(0.05)


def wait_for_no_processes(cluster: SlurmCluster, timeout_s: float = 20.0) -> None:
    """Return once nothing but the daemons runs inside; fail with what does."""
    deadline = time.monotonic() + timeout_s
    while left := cluster.processes():
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def test_a_job_on_two_nodes_sees_two_machines_with_a_gpu_each(cluster, script, tmp_path):
    see = 'echo "$SLURM_PROCID $(hostname) $(hostname -I) gpu=$CUDA_VISIBLE_DEVICES cpus=$SLURM_CPUS_ON_NODE"'
    job = cluster.submit(
        script(f"srun bash -c '{see}'"),
        *"--partition=train --nodes=2 --ntasks-per-node=1 --gres=gpu:1 --exclusive".split(),
        output_option(tmp_path),
    )
    assert cluster.wait(job) == JobResult("COMPLETED", exit_code=0, signal=0, restarts=0)
    assert sorted((tmp_path / "output.txt").read_text().split("\n")) == [
        "",
        "0 node1 10.77.0.11  gpu=0 cpus=16",
        "1 node2 10.77.0.12  gpu=0 cpus=16",
    ]


def test_nodes_share_files_but_not_their_memory_folders(cluster, tmp_path):
    mark = f"mark-{uuid.uuid4().hex}"
    folders = ("/dev/shm", "/tmp/ray")
    for name in ("node1", "node2"):
        write = "; ".join(f"echo {name} >> {folder}/{mark}" for folder in (*folders, tmp_path))
        assert cluster.run("sh", "-c", write, node=name).returncode == 0
    for folder in folders:
        assert cluster.run("cat", f"{folder}/{mark}", node="node2").stdout == "node2\n"
        assert cluster.run("rm", f"{folder}/{mark}", node="node1").returncode == 0
        assert not Path(folder, mark).exists()
    assert (tmp_path / mark).read_text() == "node1\nnode2\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("exit 7", JobResult("FAILED", exit_code=7, signal=0, restarts=0)),
        ("kill -KILL $$", JobResult("FAILED", exit_code=0, signal=9, restarts=0)),
        ("srun bash -c 'exit 9'; exit $?", JobResult("FAILED", exit_code=9, signal=0, restarts=0)),
    ],
    ids=["exit", "signal", "the exit code of a step"],
)
def test_how_a_batch_script_ended_comes_back(cluster, script, tmp_path, body, expected):
    assert cluster.wait(cluster.submit(script(body), output_option(tmp_path))) == expected


def test_the_script_gets_its_arguments_variables_and_folder(cluster, script, tmp_path):
    body = 'echo "$* $VARIABLE $PWD $SLURM_SUBMIT_DIR"; echo "$0"'
    folder = tmp_path / "a folder"
    folder.mkdir()
    job = cluster.submit(
        script(body), output_option(tmp_path), args=("one", "two words"), env={"VARIABLE": "value"}, cwd=folder
    )
    cluster.wait(job)
    told, own_path = (tmp_path / "output.txt").read_text().splitlines()
    assert told == f"one two words value {folder} {folder}"
    assert own_path.startswith("/var/lib/slurm/node")  # a copy of the script, not the file that was submitted


def test_a_cancelled_job_gets_term_in_its_batch_shell_and_in_its_steps(cluster, script, tmp_path):
    body = """trap 'echo batch got TERM; wait; exit 3' TERM
srun bash -c 'trap "echo step got TERM; exit 4" TERM; echo ready; sleep 60 & wait' &
wait"""
    job = cluster.submit(script(body), output_option(tmp_path))
    wait_for_text(tmp_path / "output.txt", "ready")
    cluster.cancel(job)
    assert cluster.wait(job).state == "CANCELLED"
    lines = (tmp_path / "output.txt").read_text().splitlines()
    assert "batch got TERM" in lines and "step got TERM" in lines
    wait_for_no_processes(cluster)


def test_what_ignores_term_is_killed_after_a_while(cluster, script, tmp_path):
    job = cluster.submit(
        script("trap 'echo TERM' TERM; echo ready; while :; do sleep 1; done"), output_option(tmp_path)
    )
    wait_for_text(tmp_path / "output.txt", "ready")
    cluster.cancel(job)
    start = time.monotonic()
    assert cluster.wait(job).signal == 9
    assert 3 < time.monotonic() - start < 20  # KillWait in slurm.conf, and what the controller adds
    wait_for_no_processes(cluster)


def test_processes_that_run_inside_are_found_on_every_node(cluster, script, tmp_path):
    job = cluster.submit(script("srun sleep 61 & wait"), "--nodes=2", output_option(tmp_path))
    deadline = time.monotonic() + 20
    while len(found := [line for line in cluster.processes().values() if line.endswith("/sleep 61")]) < 2:
        assert time.monotonic() < deadline, cluster.processes()
        time.sleep(0.05)
    assert len(found) == 2
    cluster.cancel(job)
    cluster.wait(job)
    wait_for_no_processes(cluster)


def test_a_requeued_job_runs_again_and_counts_its_restarts(cluster, script, tmp_path):
    body = 'echo "restart ${SLURM_RESTART_COUNT:-none}"; [ -n "$SLURM_RESTART_COUNT" ] || { sleep 60 & wait; }'
    job = cluster.submit(script(body), output_option(tmp_path), "--requeue", "--open-mode=append")
    wait_for_text(tmp_path / "output.txt", "restart none")
    assert cluster.run("scontrol", "requeue", str(job)).returncode == 0
    assert cluster.wait(job) == JobResult("COMPLETED", exit_code=0, signal=0, restarts=1)
    assert "restart 1" in (tmp_path / "output.txt").read_text()


def test_a_heterogeneous_job_gets_its_gpu_nodes_and_its_cpu_node(cluster, script, tmp_path):
    body = """echo "$SLURM_JOB_NODELIST_HET_GROUP_0 $SLURM_JOB_NODELIST_HET_GROUP_1"
srun --het-group=0 hostname
srun --het-group=1 hostname"""
    options = "--partition=train --nodes=2 --gres=gpu:1 : --partition=cpu --nodes=1".split()
    job = cluster.submit(script(body), output_option(tmp_path), *options)
    assert cluster.wait(job).state == "COMPLETED"
    assert [component["NodeList"] for component in cluster.jobs(job)] == ["node[1-2]", "node3"]
    groups, *hosts = (tmp_path / "output.txt").read_text().splitlines()
    assert groups == "node[1-2] node3"
    assert (sorted(hosts[:2]), hosts[2:]) == (["node1", "node2"], ["node3"])


def test_pyxis_options_reach_the_tasks_of_their_step_only(cluster, script, tmp_path):
    body = """srun --container-image=registry#image:tag --container-mounts=/a:/b,/c:/d:ro --no-container-mount-home env
echo --
srun env"""
    stale = {"FAKE_PYXIS_CONTAINER_NAME": "of whoever submitted"}
    cluster.wait(cluster.submit(script(body), output_option(tmp_path), env=stale))
    inside, outside = (tmp_path / "output.txt").read_text().split("--\n")
    assert sorted(line for line in inside.splitlines() if line.startswith("FAKE_PYXIS_")) == [
        "FAKE_PYXIS_CONTAINER_IMAGE=registry#image:tag",
        "FAKE_PYXIS_CONTAINER_MOUNTS=/a:/b,/c:/d:ro",
        "FAKE_PYXIS_NO_CONTAINER_MOUNT_HOME=1",
    ]
    assert "FAKE_PYXIS_" not in outside


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--container-image=", "--container-image: argument required"),
        ("--container-image=a --container-image=b", "--container-image: specified multiple times: b"),
        ("--container-image=a --container-mounts=/a:b", "--container-mounts: invalid format: /a:b"),
        ("--container-image=a --container-mounts=a:/b", "--container-mounts: invalid format: a:/b"),
        ("--container-image=a --container-mounts=/a,,/b", "--container-mounts: invalid format: /a,,/b"),
        (
            "--container-image=a --container-mount-home --no-container-mount-home",
            "--no-container-mount-home: given together with: container-mount-home",
        ),
        ("--container-images=a", "unrecognized option '--container-images=a'"),
    ],
)
def test_pyxis_options_that_pyxis_refuses_are_refused(cluster, options, says):
    answer = cluster.run("srun", *options.split(), "true")
    assert answer.returncode != 0
    assert says in answer.stderr


def test_of_mounts_that_are_given_twice_slurm_hands_on_the_last(cluster):
    options = "--container-image=a --container-mounts=/a:/b --container-mounts=/c:/d".split()
    lines = cluster.run("srun", *options, "env").stdout.splitlines()
    assert [line for line in lines if "MOUNTS" in line] == ["FAKE_PYXIS_CONTAINER_MOUNTS=/c:/d"]


def test_pyxis_options_without_an_image_are_ignored_with_an_error(cluster):
    answer = cluster.run("srun", "--container-workdir=/x", "env")
    assert answer.returncode == 0 and "FAKE_PYXIS_" not in answer.stdout
    assert "ignoring --container-workdir because neither --container-image nor --container-name is set" in answer.stderr


def test_a_script_that_can_not_be_submitted_says_why(cluster, script):
    with pytest.raises(ClusterError, match=r"sbatch --parsable --nodes=3 .*: exit code 1: .*Node count specification"):
        cluster.submit(script("true"), "--nodes=3", "--partition=train")


def test_a_job_that_does_not_end_in_time_is_told_with_its_reason(cluster, script, tmp_path):
    job = cluster.submit(script("sleep 60"), "--hold", output_option(tmp_path))
    with pytest.raises(TimeoutError, match=rf"job {job} is PENDING \(Reason=JobHeldUser\) after 0.2 s"):
        cluster.wait(job, timeout_s=0.2)
    cluster.cancel(job)
    assert cluster.wait(job).state == "CANCELLED"


def test_all_jobs_can_be_cancelled_at_once(cluster, script, tmp_path):
    jobs = [cluster.submit(script("sleep 65"), output_option(tmp_path), option) for option in ("--nodes=1", "--hold")]
    cluster.cancel_all()
    assert [cluster.state(job) for job in jobs] == ["CANCELLED", "CANCELLED"]


def test_a_drained_node_takes_no_jobs_until_it_is_resumed(cluster, script, tmp_path):
    cluster.set_node("node3", "drain")
    job = cluster.submit(script("true"), "--partition=cpu", output_option(tmp_path))
    assert (cluster.state(job), cluster.node_states()["node3"]) == ("PENDING", "drain")
    cluster.set_node("node3", "resume")
    assert cluster.wait(job).state == "COMPLETED"


def test_a_job_in_urgent_takes_the_nodes_of_one_in_train_which_runs_again(cluster, script, tmp_path):
    body = """echo "restart ${SLURM_RESTART_COUNT:-none}"; [ -n "$SLURM_RESTART_COUNT" ] && exit
trap 'echo TERM; exit 5' TERM; sleep 60 & wait"""
    everything = "--nodes=2 --exclusive --open-mode=append".split()
    job = cluster.submit(script(body), output_option(tmp_path), *everything)
    wait_for_text(tmp_path / "output.txt", "restart none")
    urgent = cluster.submit(script("true"), f"--output={tmp_path}/urgent.txt", "--partition=urgent", *everything)
    assert cluster.wait(urgent).state == "COMPLETED"
    assert cluster.wait(job) == JobResult("COMPLETED", exit_code=0, signal=0, restarts=1)
    lines = [line for line in (tmp_path / "output.txt").read_text().splitlines() if "slurmstepd" not in line]
    assert lines == ["restart none", "TERM", "restart 1"]


def test_a_killed_node_fails_its_job_and_comes_back(cluster, script, tmp_path):
    job = cluster.submit(script("echo ready; sleep 62"), "--partition=cpu", "--no-requeue", output_option(tmp_path))
    wait_for_text(tmp_path / "output.txt", "ready")
    cluster.kill_node("node3")
    wait_for_no_processes(cluster)
    with pytest.raises(ClusterError, match="node node3 is not running"):
        cluster.run("true", node="node3")
    cluster.set_node("node3", "down")
    assert cluster.wait(job).state == "NODE_FAIL"
    cluster.start_node("node3")
    assert cluster.run("hostname", node="node3").stdout == "node3\n"
    assert cluster.wait(cluster.submit(script("true"), "--partition=cpu", output_option(tmp_path))).state == "COMPLETED"


def test_a_command_that_takes_too_long_is_killed(cluster):
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run("sleep", "63", timeout_s=0.3)
    wait_for_no_processes(cluster)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda patch: patch.setitem(NODES, "node2", "no-address"), "namespaces ended with exit code 1.*valid prefix"),
        (lambda patch: patch.setattr(cluster_module, "LIMIT_S", 0.0), "namespaces were not set up within 0 s"),
    ],
    ids=["the network can not be made", "too slow"],
)
def test_a_failed_start_says_why_and_leaves_nothing(tmp_path, monkeypatch, fault, says):
    fault(monkeypatch)
    with pytest.raises(ClusterError, match=rf"(?s)the Slurm cluster did not start: .*{says}"):
        SlurmCluster(tmp_path / "cluster").start()
    assert not [pid for pid in parents() if str(tmp_path) in command_line(pid)]


def test_only_root_can_start_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="not root: the cluster needs root with CAP_SYS_ADMIN"):
        SlurmCluster(tmp_path / "cluster").start()


def test_a_killed_test_run_leaves_no_cluster(tmp_path):
    program = f"""
from pathlib import Path
from tests.slurm.cluster import SlurmCluster
cluster = SlurmCluster(Path({str(tmp_path)!r}) / "cluster")
cluster.start()
print("started", flush=True)
input()"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout.readline() == "started\n"
        run.kill()
    deadline = time.monotonic() + 10
    while left := [pid for pid in parents() if str(tmp_path / "cluster") in command_line(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_cluster_ends_with_all_that_ran_in_it(tmp_path, script):
    with SlurmCluster(tmp_path / "cluster") as other:
        other.submit(script("setsid sleep 64 & sleep 64"), output_option(tmp_path))
        deadline = time.monotonic() + 20
        while "sleep 64" not in other.processes().values():
            assert time.monotonic() < deadline, other.processes()
            time.sleep(0.05)
    assert not [pid for pid in parents() if command_line(pid) == "sleep 64"]
    with pytest.raises(ClusterError, match="the cluster is not running"):
        other.run("true")
    with pytest.raises(ClusterError, match="has held a cluster before; give it a new folder"):
        other.start()
