"""How long a page of a long training takes, how much memory, and how quickly it answers in Chromium.

    python benchmarks/episode_report.py [--episodes 1000 100000] [--json]

Makes a log of so many attempts in a temporary folder (tests/episode_samples.py, 2,000 of them repeated with other uids,
steps and times), runs episode_report.py on it as a
program, and opens the page: seconds, peak resident memory and size of the page; then seconds until the list is there,
milliseconds of a search over all attempts, and milliseconds to open an episode.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cpu.gym_server import BROWSERS_DIR, GYM_VENV  # noqa: E402
from tests.episode_samples import sample_episodes  # noqa: E402

IN_CHROMIUM = """
import json, sys, time
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    page = playwright.chromium.launch().new_page()
    begun = time.perf_counter()
    page.goto(sys.argv[1], timeout=300_000)
    open_s = time.perf_counter() - begun
    took = "(f => { const at = performance.now(); f(); document.body.offsetHeight; return performance.now() - at; })"
    search_ms = page.evaluate(took + "(() => { byId('search').value = 'kettle session_lost'; applyFilters(); })")
    episode_ms = page.evaluate(took + "(() => openEpisode(index.details.at(-1)))")
    print(json.dumps({"open_s": round(open_s, 2), "search_ms": round(search_ms), "episode_ms": round(episode_ms)}))
"""


def write_log(folder: Path, episodes: int) -> int:
    """Write a log of so many attempts in eight files; return how many there are."""
    folder.mkdir()
    records = [asdict(record) for record in sample_episodes(min(episodes, 2000))]
    span_s, steps = records[-1]["ended_at"] - records[0]["ended_at"], records[-1]["global_step"]
    files = [(folder / f"episodes-node{number}-1.jsonl").open("w") for number in range(8)]
    for number in range(episodes):
        again, place = divmod(number, len(records))
        record = records[place]
        changed = {
            "uid": f"{record['uid']}-{again}",
            "global_step": record["global_step"] + again * steps,
            "ended_at": record["ended_at"] + again * span_s,
        }
        files[number % 8].write(json.dumps(record | changed, ensure_ascii=False) + "\n")
    for file in files:
        file.close()
    return episodes


def measure(episodes: int) -> dict[str, object]:
    """Return what one page costs."""
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder), Path(folder) / "report.html"
        attempts = write_log(run / "episodes", episodes)
        log_bytes = sum(path.stat().st_size for path in (run / "episodes").iterdir())
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, ROOT / "episode_report.py", run, "-o", page], stdout=subprocess.DEVNULL
        )
        # wait4 tells this child's own peak; RUSAGE_CHILDREN would be the greatest of all children so far.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - begun
        in_chromium = subprocess.run(
            [GYM_VENV / "bin/python", "-c", IN_CHROMIUM, page.as_uri()],
            env={**os.environ, "PLAYWRIGHT_BROWSERS_PATH": str(BROWSERS_DIR)},
            capture_output=True,
            check=True,
        )
        return {
            "attempts": attempts,
            "log_mb": round(log_bytes / 1e6),
            "wall_s": round(wall_s, 1),
            "cpu_s": round(used.ru_utime + used.ru_stime, 1),
            "peak_mib": round(used.ru_maxrss / 1024),
            "page_mb": round(page.stat().st_size / 1e6, 1),
            **json.loads(in_chromium.stdout),
            "exit": process.returncode,
        }


def main() -> int:
    """Measure each length. Return 0 if every page was made, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--json", action="store_true", help="print one JSON object a length")
    given = parser.parse_args()
    failed = 0
    for episodes in given.episodes:
        figures = measure(episodes)
        failed |= int(figures["exit"] != 0)
        if given.json:
            print(json.dumps(figures), flush=True)
        else:
            print(", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
