"""One Slurm cluster for all tests here. A machine that can't run it fails them, with what it lacks."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.rehearsal import write_rehearsal
from cpu.training_run import REPO_ROOT
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import END_S, POLL_S, PYTHON, SITE, Rehearsal

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Return the running cluster, whose nodes take pyxis' options. A test leaves all its nodes as it found them."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", pyxis=True) as running:
        yield running


@pytest.fixture(autouse=True)
def no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel what a failed test has left in the queue: it would hold the nodes that the next test waits for."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").cancel_all()


@pytest.fixture(scope="session")
def site(cluster: SlurmCluster) -> Iterator[None]:
    """The practice site, beside the controller."""
    command = (PYTHON, "-m", "cpu.practice_site", "serve", "--host", "0.0.0.0")
    program = cluster.spawn(*command, log=cluster.folder / "site.log", cwd=REPO_ROOT)
    yield
    program.kill()
    program.wait()


@pytest.fixture(scope="session")
def rehearsal(cluster: SlurmCluster, site: None, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """What `python -m cpu.rehearsal` makes, with the policy of the other trainings' tests."""
    policy = REPO_ROOT / "runs" / "policy-for-tests"
    folder = tmp_path_factory.mktemp("rehearsal")
    subprocess.run([PYTHON, "-m", "cpu.small_policy", "--output", policy], cwd=REPO_ROOT, check=True)
    (folder / "policy").symlink_to(policy)
    return Rehearsal(cluster, folder, write_rehearsal(folder, SITE, "rehearsal"))


@pytest.fixture
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
    cluster.wait_until_idle("node1", "node2", "node3")
