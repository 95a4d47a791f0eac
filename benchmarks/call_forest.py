"""What planning costs and what making rows costs, by number of calls and shape of the forest.

python benchmarks/call_forest.py [--sizes 1000 100000 1000000] [--shapes chain star random compacted]
                                 [--tokens 4] [--least-s 0.2] [--json]

Shapes: `chain` continues the last call; `star` continues the root; `random` continues any earlier call, all alike;
`compacted` starts a fresh root every 20 calls, and every tenth call is answered twice, the first answer discarded.
All calls count (policy all_captured). Each call has `--tokens` prompt tokens and as many generated ones.

Every case runs in a process of its own, so that none finds memory that another one left. Times are CPU seconds: other
work on the machine disturbs them less. Small cases are repeated for `--least-s` seconds and the median is taken.
Printed per case: rows, emitted tokens, seconds for planning and for making every row's three lists, nanoseconds per
emitted token of both together, that as a ratio to the smallest size of the same shape, and resident memory in MiB: of
the records, and added by the planned rows and by their lists.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from call_forest import CallRecord, Row, plan_rows  # noqa: E402

PARENTS: dict[str, Callable[[int], int | None]] = {
    "chain": lambda number: number - 1 if number else None,
    "star": lambda number: 0 if number else None,
    "random": lambda number: random.randrange(number) if number else None,
    # After a call that was answered twice the second answer goes on.
    "compacted": lambda number: None if number % 20 == 0 else number - (2 if number % 10 == 5 else 1),
}


@dataclass(frozen=True)
class Case:
    """What one case cost."""

    shape: str
    calls: int
    rows: int
    emitted_tokens: int
    repeats: int
    plan_s: float
    make_s: float
    ns_per_token: float
    """Planning and making, per emitted token."""
    records_mib: float
    plan_mib: float
    """Added by the planned rows."""
    lists_mib: float
    """Added by the lists of all rows, held at once."""


def forest(shape: str, calls: int, tokens: int, vocabulary: list[int]) -> list[CallRecord]:
    """Return the records; each call's tokens are a part of the vocabulary."""
    ids = [f"call-{number}" for number in range(calls)]
    records = []
    for number in range(calls):
        parent = PARENTS[shape](number)
        start = random.randrange(len(vocabulary) - 2 * tokens)
        records.append(
            CallRecord(
                ids[number],
                None if parent is None else ids[parent],
                prompt_ids=vocabulary[start : start + tokens],
                response_ids=vocabulary[start + tokens : start + 2 * tokens],
                response_logprobs=(-0.5,) * tokens,
            )
        )
    return records


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def make(rows: list[Row]) -> int:
    """Make every list of every row; return the number of emitted tokens."""
    emitted = 0
    for row in rows:
        emitted += len(row.token_ids)
        assert len(row.loss_mask) == len(row.logprobs) == len(row.token_ids)
    return emitted


def measure(shape: str, calls: int, tokens: int, least_s: float) -> Case:
    """Return what the case cost."""
    random.seed(calls)
    vocabulary = list(range(1000, 1000 + 50_000))
    base = resident_mib()
    records = forest(shape, calls, tokens, vocabulary)
    with_records = resident_mib()
    plans, makes, memory, started = [], [], None, time.process_time()
    while not plans or time.process_time() - started < least_s:
        began = time.process_time()
        rows = plan_rows(records, policy="all_captured", scored=records[-1].call_id)
        planned = time.process_time()
        with_rows = resident_mib()
        making = time.process_time()
        emitted = make(rows)
        plans.append(planned - began)
        makes.append(time.process_time() - making)
        memory = memory or (with_records - base, with_rows - with_records, resident_mib() - with_rows)
    plan_s, make_s = statistics.median(plans), statistics.median(makes)
    return Case(
        shape, calls, len(rows), emitted, len(plans), plan_s, make_s, (plan_s + make_s) / emitted * 1e9, *memory
    )


def main() -> None:
    """Run the cases and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--shapes", nargs="+", choices=PARENTS, default=list(PARENTS))
    parser.add_argument("--tokens", type=int, default=4, help="prompt tokens, and generated tokens, of each call")
    parser.add_argument("--least-s", type=float, default=0.2, help="repeat small cases for this long")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        head = f"{'shape':>10} {'calls':>8} {'rows':>7} {'tokens':>10} {'plan s':>8} {'make s':>8} {'ns/token':>9}"
        print(f"{head} {'ratio':>6} {'records MiB':>12} {'plan MiB':>9} {'lists MiB':>10}")
    # spawn: a forked process would start with this one's memory.
    context = multiprocessing.get_context("spawn")
    for shape in arguments.shapes:
        smallest = None
        for calls in sorted(arguments.sizes):
            # Unlike multiprocessing.Pool, an executor raises when its process is killed, as by lack of memory.
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                case = pool.submit(measure, shape, calls, arguments.tokens, arguments.least_s).result()
            smallest = smallest or case
            ratio = case.ns_per_token / smallest.ns_per_token
            if arguments.json:
                print(json.dumps(asdict(case) | {"ratio": ratio}), flush=True)
                continue
            numbers = f"{shape:>10} {calls:>8} {case.rows:>7} {case.emitted_tokens:>10} {case.plan_s:>8.4f}"
            numbers += f" {case.make_s:>8.4f} {case.ns_per_token:>9.1f} {ratio:>6.2f} {case.records_mib:>12.1f}"
            print(f"{numbers} {case.plan_mib:>9.1f} {case.lists_mib:>10.1f}", flush=True)


if __name__ == "__main__":
    main()
