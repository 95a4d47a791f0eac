"""Draw the learning curves of the sweep: python benchmarks/learning/plot.py [--output docs/learning_under_failures.svg]

Success on the validation tasks against valid training rollouts used: one panel for each share of broken rollouts, mean
over seeds with the range of the seeds.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.runs import mean_curve  # noqa: E402

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
    figure, panels = pyplot.subplots(1, len(rates), figsize=(5 * len(rates), 3.6), sharey=True, squeeze=False)
    for panel, rate in zip(panels[0], rates, strict=True):
        curves = {"nothing-fails": by_rate.get(0.0, {}).get("nothing-fails", []), **by_rate[rate]}
        for method, results in curves.items():
            if not results:
                continue
            used, mean, low, high = mean_curve(results, "valid_rollouts")
            label = f"{LABELS[method]} ({len(results)} seeds)"
            panel.plot(used, mean, marker="o", markersize=3, color=COLOURS[method], label=label)
            panel.fill_between(used, low, high, color=COLOURS[method], alpha=0.12, linewidth=0)
        panel.set_title(f"{rate:.0%} of the rollouts broken")
        panel.set_xlabel("valid training rollouts used")
        panel.legend(fontsize=7, loc="best")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("success on validation tasks")
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None})


def main() -> int:
    """Draw and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "learning_under_failures.svg")
    options = parser.parse_args()
    draw(load(options.results), options.output)
    print(f"drawn: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
