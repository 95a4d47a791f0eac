"""Draw the learning curves of long episodes: python benchmarks/long_episodes/plot.py [--output docs/long_episodes.svg]

Success on the validation tasks against GRPO steps, one curve for each context policy: mean over seeds with the
range of the seeds.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning import figures  # noqa: E402
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
    figure, panel = figures.pyplot.subplots(figsize=(5.5, 3.6))
    for policy, colour in COLOURS.items():
        results = by_policy.get(policy)
        if not results:
            continue
        rows = sum(result["rows_per_rollout"] for result in results) / len(results)
        figures.draw_curve(panel, results, "step", colour, f"{policy}: {rows:.1f} rows a rollout")
    panel.set_ylabel("success on validation tasks")
    figures.finish_panel(panel, "GRPO steps")
    figures.save(figure, output)


def main() -> int:
    """Draw and return 0."""
    return figures.main(__doc__, RESULTS, ROOT / "docs" / "long_episodes.svg", load, draw)


if __name__ == "__main__":
    sys.exit(main())
