"""Draw the learning curves of long episodes: python benchmarks/long_episodes/plot.py [--output docs/long_episodes.svg]

Success on the validation tasks against GRPO steps, one curve for each context policy: mean over seeds with the
range of the seeds.
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
from context_policy import ContextPolicy  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = {ContextPolicy.APPEND: "#d55e00", ContextPolicy.WINDOW: "#0072b2", ContextPolicy.SUMMARY: "#009e73"}


def load(folder: Path) -> dict[str, list[dict]]:
    """Return the results by context policy. Raises SystemExit if there is none."""
    by_policy: dict[str, list[dict]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        by_policy[result["policy"]].append(result)
    if not by_policy:
        raise SystemExit(f"no results in {folder}; run benchmarks/long_episodes/train.py first")
    return by_policy


def draw(by_policy: dict[str, list[dict]], output: Path) -> None:
    """Write the figure."""
    figure, panel = pyplot.subplots(figsize=(5.5, 3.6))
    for policy, colour in COLOURS.items():
        results = by_policy.get(policy)
        if not results:
            continue
        steps, mean, low, high = mean_curve(results, "step")
        rows = sum(result["rows_per_rollout"] for result in results) / len(results)
        label = f"{policy}: {rows:.1f} rows a rollout ({len(results)} seeds)"
        panel.plot(steps, mean, marker="o", markersize=3, color=colour, label=label)
        panel.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    panel.set_xlabel("GRPO steps")
    panel.set_ylabel("success on validation tasks")
    panel.legend(fontsize=7, loc="best")
    panel.grid(alpha=0.3)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Draw and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "long_episodes.svg")
    options = parser.parse_args()
    draw(load(options.results), options.output)
    print(f"drawn: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
