"""One Slurm cluster for all tests here. A machine that can't run it fails them, with what it lacks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

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
