"""How long the preparation of a long task list takes, and how much memory.

python benchmarks/prepare_data.py [--tasks 300000] [--format jsonl json csv] [--json]

Makes a list of WebVoyager's shape in a temporary folder (15 sites; one task in seven names a date, half of those have
passed, one in a hundred stands there twice), runs prepare_webvoyager_data.py on it as a program, and prints per format:
seconds, CPU seconds, tasks a second, peak resident memory in MiB.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "prepare_webvoyager_data.py"
SITES = 15


def tasks(count: int) -> Iterator[dict[str, str]]:
    """Yield `count` tasks; the same ones every time."""
    for number in range(count):
        if number % 100 == 99:
            number -= 50
        site = f"Site {number % SITES}"
        when = f" from May {1 + number % 20} to May {1 + number % 20 + 3}, {2024 + 4 * (number % 2)}"
        question = (
            f"Search for place {number} with at least {number % 5}.5 stars and more than {number % 900} reviews"
            f"{when if number % 7 == 0 else ''}, and name the latest one that the site's own visitors praise."
        )
        yield {
            "web_name": site,
            "id": f"{site}--{number}",
            "ques": question,
            "web": f"https://site{number % SITES}.example/",
        }


def write(path: Path, count: int) -> None:
    """Write the list in the form that the file's suffix names."""
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ["web_name", "id", "ques", "web"])
            writer.writeheader()
            writer.writerows(tasks(count))
        elif path.suffix == ".json":
            file.write("[\n" + ",\n".join(json.dumps(task) for task in tasks(count)) + "\n]\n")
        else:
            file.writelines(json.dumps(task) + "\n" for task in tasks(count))


def measure(suffix: str, count: int) -> dict[str, object]:
    """Return what one run cost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"list.{suffix}"
        write(path, count)
        command = [sys.executable, str(PROGRAM), "--input", str(path), "--output-dir", folder, "--today", "2026-12-01"]
        begun = time.perf_counter()
        process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
        with process.stdout:
            counts = json.loads(process.stdout.read())
        # wait4 tells this child's own peak; RUSAGE_CHILDREN would be the greatest of all children so far.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - begun
    return {
        "format": suffix,
        "tasks": count,
        "rows": sum(counts["written"].values()),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "tasks_per_s": round(count / wall_s),
        "peak_mib": round(used.ru_maxrss / 1024),
        "exit": process.returncode,
    }


def main() -> int:
    """Measure every format. Return 0 if every run ended well, else 1."""
    parser = argparse.ArgumentParser(description="Time and memory of prepare_webvoyager_data.py on a long list.")
    parser.add_argument("--tasks", type=int, default=300_000)
    parser.add_argument("--format", nargs="+", choices=["jsonl", "json", "csv"], default=["jsonl", "json", "csv"])
    parser.add_argument("--json", action="store_true", help="print one JSON object a format")
    given = parser.parse_args()
    failed = 0
    for suffix in given.format:
        result = measure(suffix, given.tasks)
        failed |= result["exit"] != 0
        if given.json:
            print(json.dumps(result), flush=True)
        else:
            print(
                "{format:5}: {tasks} tasks, {rows} rows, {wall_s} s ({cpu_s} s CPU), {tasks_per_s} tasks/s, "
                "peak {peak_mib} MiB".format(**result),
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
