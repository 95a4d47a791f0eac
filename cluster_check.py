"""Waits for every node and GPU of a job to join Ray, then checks from a Ray worker on each node that it can train.

    python cluster_check.py --address HOST:PORT --nodes NAME... --gpus-per-node N [--timeout S]
                            exit 0: all nodes can train; 1: one is missing or can't; 2: wrong usage

Each node must have been started with a Ray resource `node_name:NAME`. A worker on each node imports the recipe's
modules, looks at the patches of verl, and connects to every environment server and to the judge: it does what an
agent-loop worker will need, in the environment that Ray gives to it.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe_settings import RecipeSettings

POLL_S = 1.0
REPORT_EVERY_S = 10.0
WORKER_TIMEOUT_S = 300.0
"""A worker imports verl, which takes minutes from a cold network file system."""
RESOURCE = "node_name:"
MODULES = ("browser_agent_loop", "browser_sampler", "dataset", "group_stats", "judge")


class ClusterError(Exception):
    """A node is missing, or can't train; the text names it."""


def joined(nodes: Sequence[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Return Ray's id and the number of GPUs of each living node, by the name that it was started with."""
    found = {}
    for node in nodes:
        resources = node["Resources"] if node["Alive"] else {}
        for resource in resources:
            if resource.startswith(RESOURCE):
                found[resource.removeprefix(RESOURCE)] = (node["NodeID"], int(resources.get("GPU", 0)))
    return found


def lacking(expected: Sequence[str], gpus_per_node: int, found: dict[str, tuple[str, int]]) -> list[str]:
    """Return what is still missing, a phrase per node."""
    missing = []
    for name in expected:
        if name not in found:
            missing.append(f"{name} has not joined")
        elif found[name][1] < gpus_per_node:
            missing.append(f"{name} has joined with {found[name][1]} of {gpus_per_node} GPUs")
    return missing


def wait_for_nodes(
    expected: Sequence[str], gpus_per_node: int, timeout_s: float, say: Callable[[str], None]
) -> dict[str, str]:
    """Return Ray's id of each expected node once all have joined with their GPUs. Raises ClusterError."""
    started = reported = time.monotonic()
    while True:
        found = joined(ray.nodes())
        missing = lacking(expected, gpus_per_node, found)
        now = time.monotonic()
        gpus = sum(found[name][1] for name in expected if name in found)
        state = (
            f"{sum(n in found for n in expected)} of {len(expected)} nodes, {gpus} of {gpus_per_node * len(expected)}"
        )
        if not missing:
            say(f"{state} GPUs after {now - started:.0f} s")
            return {name: found[name][0] for name in expected}
        if now - started > timeout_s:
            raise ClusterError(f"{state} GPUs after {timeout_s:g} s: {'; '.join(missing)}")
        if now - reported >= REPORT_EVERY_S:
            say(f"{state} GPUs after {now - started:.0f} s: {'; '.join(missing)}")
            reported = now
        time.sleep(POLL_S)


def look_around(modules: Sequence[str]) -> dict[str, Any]:
    """Return what a Ray worker finds on its node: Python, verl, the recipe, its settings, and every problem."""
    problems = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever the import raises is the answer
            problems.append(f"import {name}: {type(error).__name__}: {error}")
    answer = {"python": sys.version.split()[0], "problems": problems}
    try:
        import patches
        from recipe_settings import RecipeSettings
    except ImportError:
        problems.append(f"the recipe's folder is not on PYTHONPATH in this worker: {sys.path[:3]}")
        return answer
    # Before `check`, which would put in place what a worker of the training would lack.
    try:
        patches.require_applied()
    except patches.PatchError as error:
        problems.append(str(error))
    problems += [record.text for record in patches.check() if record.refused]
    folder = Path(patches.FOLDER)
    files = sorted([*folder.glob("*.py"), *folder.glob("configs/*")])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    settings = RecipeSettings.from_env()
    versions = {name: importlib.metadata.version(name) for name in ("verl", "ray", "torch", "transformers")}
    return {**answer, "recipe": f"{folder} {digest}", "settings": repr(settings), **versions}


def unreachable(urls: Sequence[str]) -> list[str]:
    """Return a problem for each address that a worker on its node can't connect to."""
    problems = []
    for url in urls:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname, port), timeout=10).close()
        except OSError as error:
            problems.append(f"can't connect to {url}: {error}")
    return problems


def check_workers(node_ids: dict[str, str], urls: Sequence[str], timeout_s: float) -> dict[str, list[str]]:
    """Return the problems of each node: what its worker found, and where it differs from the first node's."""

    def on(node_id: str, work: Callable, *arguments: Any) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return ray.remote(work).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*arguments)

    calls = {name: (on(id_, look_around, MODULES), on(id_, unreachable, urls)) for name, id_ in node_ids.items()}
    deadline = time.monotonic() + timeout_s
    problems: dict[str, list[str]] = {}
    first: dict[str, Any] | None = None
    for name, (looked, connected) in calls.items():
        try:
            answer = ray.get(looked, timeout=max(0.1, deadline - time.monotonic()))
            problems[name] = answer.pop("problems") + ray.get(connected, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            problems[name] = [f"its worker did not answer within {timeout_s:g} s"]
            continue
        except RayError as error:
            problems[name] = [f"its worker failed: {str(error).strip().splitlines()[-1]}"]
            continue
        first = first or answer
        problems[name] += [
            f"{key} is {value!r} here and {first.get(key)!r} on {next(iter(calls))}"
            for key, value in answer.items()
            if value != first.get(key)
        ]
    return problems


def main(argv: list[str] | None = None) -> int:
    """Wait and check. Return 0 when every node can train, else 1; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="cluster_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True, help="Ray's head, HOST:PORT")
    parser.add_argument("--nodes", nargs="+", required=True, metavar="NAME", help="the nodes of the job")
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for the nodes to join (default 600)")
    arguments = parser.parse_args(argv)
    settings = RecipeSettings.from_env()
    urls = [*settings.environment_urls, *([settings.judge_url] if settings.judge_url else [])]

    def say(line: str) -> None:
        print(f"cluster: {line}", flush=True)

    try:
        connect(arguments.address, arguments.timeout)
        node_ids = wait_for_nodes(arguments.nodes, arguments.gpus_per_node, arguments.timeout, say)
    except ClusterError as error:
        say(f"FAILED: {error}")
        return 1
    problems = check_workers(node_ids, urls, WORKER_TIMEOUT_S)
    for name, found in problems.items():
        say(f"{name} {'FAILED' if found else 'ok'}")
        for problem in found:
            print(f"  {problem}", flush=True)
    return 1 if any(problems.values()) else 0


def connect(address: str, timeout_s: float) -> None:
    """Join Ray's head as a driver once it listens. Raises ClusterError when it does not in time."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=POLL_S).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"Ray's head does not answer at {address} after {timeout_s:g} s: {error}") from None
            time.sleep(POLL_S)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ClusterError(f"Ray's head at {address} does not take a driver: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
