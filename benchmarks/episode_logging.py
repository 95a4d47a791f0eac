"""What the episode log costs: the same rollouts with the log and without it, in one run.

python benchmarks/episode_logging.py [--rollouts 512] [--turns 10] [--repeats 7] [--generation 1.0]

The agent loop against the fake environment in a process of its own, which answers after the time that the real server
took (loop_overhead.py, LATENCY_S) and shows a page of about --page characters; the policy takes --generation seconds a
turn. All rollouts run in one worker, of which verl starts eight, and end at nearly the same time, so that as many lines
as can be wait for each other. With --generation 0 and --instant nothing is waited for, and what is left is the
processor's time. Printed, as medians over the repeats: seconds of both sides, their ratio, the processor's milliseconds
of a rollout and of making and writing its line, the line's size, and the longest time that the event loop was held up,
with the log and without.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from loop_overhead import LATENCY_S, InstantPolicy, Loops  # noqa: E402

from episode_log import EpisodeLog, iter_episodes  # noqa: E402

SERVER = """
import asyncio, json, sys
from tests.fake_environment import FakeEnvironment
from tests.fake_site import GYM_FILES, Link, Page
links = int(sys.argv[2]) // 65
page = Page("A shop", "Some words of a page, prices like 3.50, an address bob@shop.example. " * (links // 2),
            tuple(Link(f"Product number {i}", "about.html") for i in range(links)))
async def main():
    async with FakeEnvironment({f"{GYM_FILES}site/index.html": page}, latency_s=json.loads(sys.argv[1])) as environment:
        print(environment.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""
BEAT_S = 0.01


class KeepingLog(EpisodeLog):
    """The log, which keeps its records."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept = []

    async def append(self, record, secrets=()) -> None:
        self.kept.append(record)
        await super().append(record, secrets)


class SlowPolicy(InstantPolicy):
    """An engine that takes its time."""

    generation_s = 0.0

    async def generate(self, *args, **kwargs):
        await asyncio.sleep(self.generation_s)
        return await super().generate(*args, **kwargs)


@dataclass(frozen=True)
class Cost:
    """What some rollouts took together."""

    wall_s: float
    cpu_s: float
    held_up_s: float
    """Longest delay of a callback of the event loop."""


async def cost(loops: Loops, rollouts: int, log: EpisodeLog) -> Cost:
    """Return what these rollouts take, run at once, with or without a log."""
    held_up_s, running = 0.0, True

    async def beat() -> None:
        nonlocal held_up_s
        while running:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            held_up_s = max(held_up_s, time.perf_counter() - before - BEAT_S)

    heart = asyncio.create_task(beat())
    loops.episode_log = log
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(loops.run() for _ in range(rollouts)))
    spent = time.perf_counter() - wall, time.process_time() - cpu
    running = False
    await heart
    return Cost(*spent, held_up_s)


async def measure(url: str, options: argparse.Namespace) -> None:
    """Print the figures; the two sides take turns, so that both see the same machine."""
    SlowPolicy.generation_s = options.generation
    loops = Loops(url, options.turns, policy_class=SlowPolicy)
    await loops.run()
    costs: dict[str, list[Cost]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        logs = {"without": EpisodeLog(None), "with": KeepingLog(Path(folder))}
        for _ in range(options.repeats):
            for name, log in logs.items():
                costs[name].append(await cost(loops, options.rollouts, log))
        records = list(iter_episodes(Path(folder)))
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / len(records)
        began = time.process_time()
        for record in logs["with"].kept:
            logs["with"].write(record)
        line_ms = (time.process_time() - began) / len(records) * 1000
    assert len(records) == options.rollouts * options.repeats
    assert not any(record["texts_left_out"] for record in records)

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(cost, field) for cost in costs[name])

    walls, held_up = ([median(name, field) for name in costs] for field in ("wall_s", "held_up_s"))
    rollout_ms = median("without", "cpu_s") / options.rollouts * 1000
    print(
        f"{options.rollouts} rollouts of {options.turns} turns: {walls[0]:.2f} s without the log, "
        f"{walls[1]:.2f} s with it, ratio {walls[1] / walls[0]:.4f}\n"
        f"processor: {rollout_ms:.2f} ms a rollout, {line_ms:.2f} ms a line of {size / 1024:.1f} KiB, "
        f"{line_ms / rollout_ms:.2%}\n"
        f"event loop held up at most {held_up[0] * 1000:.0f} ms without the log, {held_up[1] * 1000:.0f} ms with it",
        flush=True,
    )


def main() -> int:
    """Run the benchmark and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--generation", type=float, default=1.0, help="seconds of generation a turn")
    parser.add_argument("--instant", action="store_true", help="an environment that answers at once")
    parser.add_argument("--page", type=int, default=650, help="characters of a page")
    options = parser.parse_args()
    command = [sys.executable, "-c", SERVER, json.dumps({} if options.instant else LATENCY_S), str(options.page)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = os.environ["NEMO_GYM_URL"] = server.stdout.readline().strip()
        asyncio.run(measure(url, options))
        server.stdin.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
