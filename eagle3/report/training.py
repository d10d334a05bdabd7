"""Training curves: every number of a draft's metrics.jsonl, grouped by name, the known ones first."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas

from eagle3.report.blocks import Table, cells
from eagle3.report.formats import number
from eagle3.report.style import COLOURS, NEUTRAL, WIDTH, subplots

# Titles of the metrics by the name without its depth; what is not listed is shown under its own name.
TITLES = {
    "loss": "Loss",
    "accuracy": "Accuracy by draft depth",
    "acceptance": "Conditional acceptance on validation",
    "acceptance_length": "Simulated acceptance length on validation",
    "lr": "Learning rate",
    "gradient_norm": "Gradient norm",
    "tokens": "Tokens seen",
    "tokens_per_second": "Tokens per second",
}
_DEPTH = re.compile(r"^(?P<name>.+)/depth_(?P<depth>\d+)$")
# Points of a line beyond which neighbours are averaged: more are not visible.
_POINTS = 400

Series = tuple[list[float], list[float]]


def training_series(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Series]]:
    """Metric name -> depth ("" without one) -> (steps, values); only finite numbers.

    The metrics of a depth are named "accuracy/depth_0", "accuracy/depth_1", ...
    """
    groups: dict[str, dict[str, Series]] = {}
    for row in history:
        for key, value in _numbers(row):
            match = _DEPTH.match(key)
            name, depth = (match["name"], match["depth"]) if match else (key, "")
            steps, values = groups.setdefault(name, {}).setdefault(depth, ([], []))
            steps.append(float(row["step"]))
            values.append(value)
    known = [name for name in TITLES if name in groups]
    return {name: groups[name] for name in [*known, *sorted(groups.keys() - TITLES.keys())]}


def _numbers(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What of a row can be drawn."""
    return [
        (key, float(value))
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    ]


def training_curves(history: Sequence[Mapping[str, Any]]) -> Canvas:
    """A panel a metric, a line a depth."""
    groups = training_series(history)
    columns = 2
    lines = -(-len(groups) // columns)
    canvas, axes = subplots(lines, columns, WIDTH, 2.3 * lines)
    for axis, (name, series) in zip(axes, groups.items(), strict=False):
        for index, (depth, (steps, values)) in enumerate(series.items()):
            colour = COLOURS[index % len(COLOURS)]
            smooth_steps, smooth_values = thin(steps, values)
            marker = "o-" if len(smooth_steps) < 30 else "-"
            axis.plot(smooth_steps, smooth_values, marker, color=colour, markersize=3.5, label=depth or None)
        axis.set_title(TITLES.get(name, name), loc="left", fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        if len(series) > 1:
            axis.legend(title="depth", ncols=2, fontsize=8, title_fontsize=8)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    if "acceptance_length" in groups:
        axis = axes[list(groups).index("acceptance_length")]
        steps, values = next(iter(groups["acceptance_length"].values()))
        best = max(range(len(values)), key=values.__getitem__)
        axis.axvline(steps[best], color=NEUTRAL, linestyle="--", linewidth=1.2)
    return canvas


def thin(steps: Sequence[float], values: Sequence[float]) -> Series:
    """At most `_POINTS` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(steps) / _POINTS))
    starts = range(0, len(steps), size)
    return (
        [sum(steps[start : start + size]) / len(steps[start : start + size]) for start in starts],
        [sum(values[start : start + size]) / len(values[start : start + size]) for start in starts],
    )


def training_table(training: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """The end of every training: last values, and the best validation with its step."""
    body = []
    for name, history in training.items():
        groups = training_series(history)
        length = groups.get("acceptance_length", {}).get("")
        best = max(range(len(length[1])), key=length[1].__getitem__) if length else None
        body.append(
            cells(
                [
                    name,
                    f"{int(history[-1]['step']):,}",
                    number(_last(groups, "loss"), 3),
                    number(length[1][best] if length and best is not None else None, 3),
                    number(length[0][best] if length and best is not None else None, 0),
                    number(_last(groups, "tokens"), 0),
                ]
            )
        )
    return Table(
        caption="Trainings",
        columns=("Draft", "Steps", "Last loss", "Best simulated acceptance length", "At step", "Tokens seen"),
        rows=tuple(body),
        note="The checkpoint with the best simulated acceptance length on validation rows is measured.",
    )


def _last(groups: Mapping[str, Mapping[str, Series]], name: str) -> float | None:
    series = groups.get(name, {}).get("")
    return series[1][-1] if series else None
