"""Draw the learning curves of the sweep: python benchmarks/learning/plot.py [--output docs/learning_under_failures.svg]

Success on the validation tasks against valid training rollouts used: one panel for each share of broken rollouts, mean
over seeds with the range of the seeds.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning import figures  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
LABELS = {
    "nothing-fails": "nothing fails",
    "dropped": "this recipe, dropped",
    "flagged": "this recipe, flagged",
    "zeros": "failures as zeros, stock GRPO",
}
COLOURS = {"nothing-fails": "#555555", "dropped": "#0072b2", "flagged": "#009e73", "zeros": "#d55e00"}


def load(folder: Path) -> dict[float, dict[str, list[dict]]]:
    """Return the results by rate and method. Raises SystemExit if there is none."""
    by_rate: dict[float, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("real"):
            continue  # two points make no curve
        method = result["method"] if result["rate"] else "nothing-fails"
        by_rate[result["rate"]][method].append(result)
    if not by_rate:
        raise SystemExit(f"no results in {folder}; run benchmarks/learning/sweep.py first")
    return by_rate


def draw(by_rate: dict[float, dict[str, list[dict]]], output: Path) -> None:
    """Write the figure."""
    rates = [rate for rate in sorted(by_rate) if rate] or [0.0]
    figure, panels = figures.pyplot.subplots(1, len(rates), figsize=(5 * len(rates), 3.6), sharey=True, squeeze=False)
    for panel, rate in zip(panels[0], rates, strict=True):
        curves = {"nothing-fails": by_rate.get(0.0, {}).get("nothing-fails", []), **by_rate[rate]}
        for method, results in curves.items():
            if not results:
                continue
            figures.draw_curve(panel, results, "valid_rollouts", COLOURS[method], LABELS[method])
        panel.set_title(f"{rate:.0%} of the rollouts broken")
        figures.finish_panel(panel, "valid training rollouts used")
    panels[0][0].set_ylabel("success on validation tasks")
    figures.save(figure, output)


def main() -> int:
    """Draw and return 0."""
    return figures.main(__doc__, RESULTS, ROOT / "docs" / "learning_under_failures.svg", load, draw)


if __name__ == "__main__":
    sys.exit(main())
