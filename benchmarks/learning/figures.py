"""What the figures of learning curves share."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

from benchmarks.learning.runs import mean_curve  # noqa: E402


def draw_curve(panel: Any, results: Sequence[dict], x: str, colour: str, label: str) -> None:
    """Draw the mean success over `x` of one run per seed, and the range of the seeds."""
    xs, mean, low, high = mean_curve(results, x)
    panel.plot(xs, mean, marker="o", markersize=3, color=colour, label=f"{label} ({len(results)} seeds)")
    panel.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)


def finish_panel(panel: Any, xlabel: str) -> None:
    """Label a panel whose curves are drawn."""
    panel.set_xlabel(xlabel)
    panel.legend(fontsize=7, loc="best")
    panel.grid(alpha=0.3)


def save(figure: Any, output: Path) -> None:
    """Write the figure, the same bytes for the same curves, and close it."""
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None})
    pyplot.close(figure)


def main(
    doc: str, results: Path, output: Path, load: Callable[[Path], dict], draw: Callable[[dict, Path], None]
) -> int:
    """Run a program that draws what it loads from a folder of results; return 0."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    draw(load(options.results), options.output)
    print(f"drawn: {options.output}")
    return 0
