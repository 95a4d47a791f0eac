"""The pictures of a run's page that the README shows, taken in Chromium.

    python -m tests.report_screenshots [--report runs/demo-.../report.html] [--output docs]

Writes report-light.png, report-dark.png and report-phone.png, of the given page or else of a made-up run; the same ones
as long as the page is the same.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import episode_report
from cpu.gym_server import BROWSERS_DIR, GYM_VENV
from tests.episode_samples import write_samples

ROOT = Path(__file__).resolve().parents[1]
IN_CHROMIUM = """
import sys
from playwright.sync_api import sync_playwright
address, output = sys.argv[1:3]
with sync_playwright() as playwright:
    browser = playwright.chromium.launch()
    for name, width, height, scheme in (
        ("light", 1000, 900, "light"), ("dark", 1000, 900, "dark"), ("phone", 390, 844, "light")
    ):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(address)
        if name == "dark":
            page.fill("#search", "success")
            page.evaluate(
                "openEpisode(shown.find(i => held.has(i) && recordOf(i).rows > 2 && recordOf(i).discarded_calls)"
                " ?? shown.find(i => held.has(i) && recordOf(i).turns > 2))"
            )
            page.evaluate("walkTurns(2); document.activeElement.blur()")
            page.evaluate("document.querySelector('.forest').scrollIntoView({block: 'end'})")
        page.screenshot(path=f"{output}/report-{name}.png")
"""


def main() -> int:
    """Take the pictures and return 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.report_screenshots", description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, metavar="FILE", help="a page that episode_report.py has written")
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = options.report and options.report.resolve()
        if page is None:
            run = Path(folder) / "made-up-run"
            write_samples(run / "episodes", episodes=1500, half_line=False)
            page = episode_report.write_report(run)
        subprocess.run(
            [GYM_VENV / "bin/python", "-c", IN_CHROMIUM, page.as_uri(), options.output],
            env={**os.environ, "PLAYWRIGHT_BROWSERS_PATH": str(BROWSERS_DIR)},
            check=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
