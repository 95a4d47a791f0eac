"""Waiting for nodes and GPUs, and naming the node that is missing or can't train."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import cluster_check
from cluster_check import ClusterError, joined, lacking, unreachable, wait_for_nodes


def node(name: str, gpus: int = 8, alive: bool = True, node_id: str = "") -> dict:
    """Return what ray.nodes() says of a node that was started under this name."""
    resources = {"CPU": 16.0, f"node_name:{name}": 1.0, "node:10.0.0.1": 1.0} | ({"GPU": float(gpus)} if gpus else {})
    return {"Alive": alive, "NodeID": node_id or f"id of {name}", "Resources": resources}


def test_living_nodes_are_known_by_the_name_that_they_were_started_with():
    nodes = [node("a"), node("b", gpus=0), node("c", alive=False), {"Alive": True, "NodeID": "x", "Resources": {}}]
    assert joined(nodes) == {"a": ("id of a", 8), "b": ("id of b", 0)}


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([node("a"), node("b")], []),
        ([node("a")], ["b has not joined"]),
        ([node("a", gpus=4), node("b", alive=False)], ["a has joined with 4 of 8 GPUs", "b has not joined"]),
        ([node("a"), node("stranger")], ["b has not joined"]),
        ([node("a"), node("b", gpus=16)], []),
    ],
)
def test_what_is_missing_is_named(nodes, missing):
    assert lacking(["a", "b"], 8, joined(nodes)) == missing


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def ray_says(monkeypatch):
    """Make ray.nodes() answer as the function of the time says."""

    def set_answer(answer):
        clock = Clock()
        monkeypatch.setattr(cluster_check, "time", clock)
        monkeypatch.setattr(cluster_check.ray, "nodes", lambda: answer(clock.now))
        return clock

    return set_answer


def test_it_waits_with_progress_until_all_have_joined(ray_says):
    ray_says(lambda now: [node("a")] if now < 25 else [node("a"), node("b")])
    said = []
    assert wait_for_nodes(["a", "b"], 8, 60, said.append) == {"a": "id of a", "b": "id of b"}
    assert said == [
        "1 of 2 nodes, 8 of 16 GPUs after 10 s: b has not joined",
        "1 of 2 nodes, 8 of 16 GPUs after 20 s: b has not joined",
        "2 of 2 nodes, 16 of 16 GPUs after 25 s",
    ]


def test_a_node_that_never_joins_is_named_at_the_deadline(ray_says):
    clock = ray_says(lambda now: [node("a", gpus=7)])
    with pytest.raises(ClusterError, match=r"1 of 2 nodes, 7 of 16 GPUs after 30 s: a has joined with 7 of 8 GPUs; b"):
        wait_for_nodes(["a", "b"], 8, 30, lambda line: None)
    assert clock.now <= 32


def test_a_head_that_never_listens_ends_in_time(ray_says):
    clock = ray_says(lambda now: [])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ClusterError, match="Ray's head does not answer at 127.0.0.1:"):
            cluster_check.connect(f"127.0.0.1:{closed.getsockname()[1]}", 5)
    assert clock.now <= 7


def test_addresses_that_a_worker_cannot_connect_to_are_named():
    with socket.socket() as open_, socket.socket() as closed:
        for each in (open_, closed):
            each.bind(("127.0.0.1", 0))
        open_.listen()
        good, bad = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (open_, closed))
        (problem,) = unreachable([good, bad])
    assert problem.startswith(f"can't connect to {bad}: ")


def test_a_worker_says_what_it_cannot_import_and_what_it_runs():
    answer = cluster_check.look_around(["json", "no_such_module"])
    assert answer["problems"][0] == "import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    assert {"python", "recipe", "settings", "verl", "ray"} <= set(answer)


def test_every_module_that_workers_need_exists():
    assert not [p for p in cluster_check.look_around(cluster_check.MODULES)["problems"] if p.startswith("import")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("patched", [True, False], ids=["on PYTHONPATH", "only on sys.path"])
def test_a_worker_that_would_train_without_the_patches_is_found(patched):
    """Ray puts the driver's folder on its workers' sys.path, so the modules can be there and the patches not."""
    root = str(Path(cluster_check.__file__).parent)
    program = f"import json, sys; sys.path.insert(0, {root!r}); import cluster_check\n"
    program += "print(json.dumps(cluster_check.look_around(['browser_sampler'])['problems']))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONPATH": root} if patched else {}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd="/")
    problems = json.loads(done.stdout.splitlines()[-1])
    assert [problem.startswith("Refusing to train") for problem in problems] == ([] if patched else [True])
