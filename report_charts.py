"""The charts of a run's report as SVG texts for one HTML page: matplotlib draws, the page's style sheet colours.

Nothing is told by colour alone: lines differ in dashes and marks, areas in their hatching, kinds have a strip each.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from report_figures import Period

# Drawn with colours that stand for the page's variables, so that one drawing serves light and dark.
INK, FAINT, FIRST, SECOND, THIRD, FOURTH = (f"#0a0b0{number}" for number in range(1, 7))
_VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    THIRD: "var(--third)",
    FOURTH: "var(--fourth)",
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": FAINT,
    "hatch.color": INK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 4,
    "lines.linewidth": 1.5,
}
WIDTH_IN = 5.0
"""5 inches are 360 units: about a phone's width, so that texts stay readable there."""
MOST_STRIPS = 10


def success_chart(periods: Sequence[Period], title: str) -> str:
    """Return success over valid and over all rollouts by step, each with its 95% interval."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure, panel = _panel(2.7)
        steps = [_middle(period) for period in periods]
        for name, colour, style, mark in (
            ("over_valid", FIRST, "-", "o"),
            ("over_all", SECOND, "--", "s"),
        ):
            rates = [getattr(period.counts, name) for period in periods]
            intervals = [rate.interval() or (math.nan, math.nan) for rate in rates]
            values = [math.nan if rate.value is None else rate.value for rate in rates]
            low, high = zip(*intervals, strict=True)
            panel.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
            label = {"over_valid": "over valid rollouts", "over_all": "over all rollouts"}[name]
            panel.plot(steps, values, style, marker=mark, color=colour, label=label)
        panel.set_ylim(-0.03, 1.03)
        panel.set_ylabel("success")
        _finish(panel, steps)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)
        return _svg(figure, title)


def strips_chart(rows: Mapping[str, Sequence[float]], xs: Sequence[float], xlabel: str, title: str) -> str:
    """Return one strip of columns for each name, all on one scale; those beyond MOST_STRIPS are summed as `others`."""
    ranked = sorted(rows.items(), key=lambda item: (-sum(item[1]), item[0]))
    if len(ranked) > MOST_STRIPS:
        others = [sum(values) for values in zip(*(row for _, row in ranked[MOST_STRIPS - 1 :]), strict=True)]
        ranked = [*ranked[: MOST_STRIPS - 1], ("others", others)]
    tallest = max((max(values) for _, values in ranked), default=0) or 1
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure, panel = _panel(0.75 + 0.36 * len(ranked), left=0.02)
        for place, (name, values) in enumerate(reversed(ranked)):
            heights = [0.55 * value / tallest for value in values]
            _columns(panel, xs, heights, [float(place)] * len(xs), color=FIRST)
            panel.axhline(place, color=FAINT, linewidth=0.8)
            label = f"{_plain(name)}  {sum(values):g}"
            panel.annotate(label, (0, place + 0.6), xycoords=("axes fraction", "data"), fontsize=8.5, parse_math=False)
        panel.set_ylim(-0.05, len(ranked))
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
        panel.set_title(f"tallest column: {tallest:g}", loc="right", fontsize=8.5)
        _finish(panel, xs, grid=False)
        panel.set_xlabel(xlabel)
        return _svg(figure, title)


def means_chart(panels_of: Sequence[tuple[str, Sequence[float | None]]], periods: Sequence[Period], title: str) -> str:
    """Return one panel under the other, each a mean by step."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        height_in = 0.5 + 0.95 * len(panels_of)
        figure = Figure(figsize=(WIDTH_IN, height_in))
        panels = figure.subplots(len(panels_of), 1, sharex=True, squeeze=False)[:, 0]
        figure.subplots_adjust(left=0.13, right=0.98, bottom=0.45 / height_in, top=1 - 0.22 / height_in, hspace=0.4)
        steps = [_middle(period) for period in periods]
        for panel, (name, values) in zip(panels, panels_of, strict=True):
            panel.plot(steps, [math.nan if v is None else v for v in values], marker="o", color=FIRST)
            panel.set_title(name, loc="left", fontsize=8.5, pad=2)
            panel.set_ylim(bottom=0)
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.grid(alpha=0.6)
        _finish(panels[-1], steps)
        return _svg(figure, title)


def time_chart(periods: Sequence[Period], title: str) -> str:
    """Return the mean seconds of an attempt by step, stacked: generation, environment, waiting and the judge."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure, panel = _panel(2.7)
        steps = [_middle(period) for period in periods]
        bottom = [0.0] * len(steps)
        for name, colour, hatch in (
            ("generation", FIRST, ""),
            ("environment", SECOND, "////"),
            ("waiting", THIRD, "||||"),
            ("judge", FOURTH, "xxxx"),
        ):
            values = [p.counts.per_attempt(getattr(p.counts, f"{name}_s")) or 0.0 for p in periods]
            _columns(
                panel, steps, values, bottom, facecolor=colour, edgecolor=INK, hatch=hatch, linewidth=0, label=name
            )
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        panel.set_ylabel("seconds an attempt")
        panel.set_ylim(bottom=0)
        _finish(panel, steps)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=4, columnspacing=1.0, handlelength=1.4)
        return _svg(figure, title)


def lines_chart(lines: Mapping[str, Mapping[int, float]], ylabel: str, title: str) -> str:
    """Return one line for each name (at most three) over the steps."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure, panel = _panel(2.5)
        looks = ((FIRST, "-", "o"), (SECOND, "--", "s"), (THIRD, ":", "^"))
        for (name, values), (colour, style, mark) in zip(lines.items(), looks, strict=False):
            panel.plot(list(values), list(values.values()), style, marker=mark, color=colour, label=name)
        panel.set_ylabel(ylabel)
        panel.set_ylim(bottom=0)
        _finish(panel, [step for values in lines.values() for step in values])
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=3)
        return _svg(figure, title)


def _panel(height_in: float, left: float = 0.13) -> tuple[Figure, Any]:
    """Return a figure of one panel with room for a legend above; margins that are computed take most of the time."""
    figure = Figure(figsize=(WIDTH_IN, height_in))
    panel = figure.subplots()
    figure.subplots_adjust(left=left, right=0.98, bottom=0.45 / height_in, top=1 - 0.3 / height_in)
    return figure, panel


def _columns(
    panel: Any, xs: Sequence[float], values: Sequence[float], bottom: Sequence[float] | None = None, **look: Any
) -> None:
    """Draw a column at each x as one path: matplotlib writes a pattern and a group for each bar of its own."""
    half = 0.42 * min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1.0)
    bottom = bottom or [0.0] * len(xs)
    edges = [edge for x in xs for edge in (x - half, x + half)]
    tops = [top for a, b in zip(bottom, values, strict=True) for top in (a + b, a)][:-1]
    panel.stairs(tops, edges, baseline=[b for b in bottom for _ in (0, 1)][:-1], fill=True, **look)


def _middle(period: Period) -> float:
    return (period.first_step + period.last_step) / 2


def _finish(panel: Any, xs: Sequence[float], grid: bool = True) -> None:
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if len(set(xs)) == 1:
        panel.set_xlim(xs[0] - 1, xs[0] + 1)
    if grid:
        panel.grid(alpha=0.6)


def _plain(name: str) -> str:
    """Return a name that any font can draw."""
    return name[:40].encode("ascii", "replace").decode()


def _svg(figure: Figure, title: str) -> str:
    """Return the drawing as an element for HTML; equal drawings are equal texts."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)  # would style the whole page
    # Several drawings share a page: only ids that are referred to stay, and those differ by their salt.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    return text.replace("<svg", f'<svg class="chart" role="img" aria-label="{title}"', 1)
