"""Figures of the evaluation: speedups with intervals, acceptance, and the time of a round."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from eagle3.report.formats import temperature_text
from eagle3.report.inputs import Inputs, Row
from eagle3.report.style import NEUTRAL, TEXT, WIDTH, colour_of, line_of, subplots
from eagle3.report.tables import ALL, PARTS, context_name, speculative, task_name

PART_COLOURS = {
    "draft": "#2f7ed8",
    "verify": "#8a8f98",
    "accept": "#1f9d78",
    "cache": "#c99a1a",
    "other": "#c0569f",
}


def forest(inputs: Inputs) -> Canvas:
    """Decode speedup with its interval, over all tasks: a row a method, a panel a temperature."""
    temperatures = inputs.temperatures
    methods = [method for method in inputs.methods if method != "vanilla"]
    height = 1.1 + 0.42 * len(methods)
    canvas, axes = subplots(len(temperatures), 1, WIDTH, height * len(temperatures), share_x=True)
    for axis, temperature in zip(axes, temperatures, strict=True):
        rows = [row for row in inputs.overall(temperature) if row["method"] != "vanilla"]
        _forest_panel(axis, rows, inputs.methods, [row["method"] for row in rows], annotate=True)
        axis.set_title(f"All tasks, {temperature_text(temperature)}", loc="left")
    axes[-1].set_xlabel("decode speedup over vanilla (95 % interval)")
    return canvas


def forest_by_task(inputs: Inputs, temperature: float) -> Canvas:
    """The same by task: a panel a task."""
    tasks = inputs.tasks
    methods = [method for method in inputs.methods if method not in ("vanilla", "vanilla-aa")]
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    canvas, axes = subplots(lines, columns, WIDTH, lines * (0.9 + 0.34 * len(methods)), share_x=True)
    for index, axis in enumerate(axes):
        if index >= len(tasks):
            axis.set_visible(False)
            continue
        found = [inputs.find(method, tasks[index], temperature) for method in methods]
        rows = [row for row in found if row is not None]
        names = [row["method"] for row in rows] if index % columns == 0 else [""] * len(rows)
        _forest_panel(axis, rows, inputs.methods, names, annotate=False)
        axis.set_title(task_name(tasks[index]), loc="left")
    canvas.supxlabel(f"decode speedup over vanilla, {temperature_text(temperature)}", fontsize=10)
    return canvas


def _forest_panel(
    axis: Axes, rows: Sequence[Row], methods: Sequence[str], names: Sequence[str], *, annotate: bool
) -> None:
    axis.axvline(1.0, color=NEUTRAL, linewidth=1.2, linestyle="--")
    for place, row in enumerate(rows):
        if row["speedup"] is None:
            continue
        colour = colour_of(row["method"], methods)
        low, high = row["speedup_low"], row["speedup_high"]
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=colour, linewidth=2.6, solid_capstyle="round")
        axis.plot(row["speedup"], place, "o", color=colour, markersize=7)
        if annotate:
            right = high if high is not None else row["speedup"]
            warning = " changes tokens" if row["lossless"]["failures"] else ""
            axis.annotate(
                f"{row['speedup']:.2f}×{warning}",
                (right, place),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.12)
    axis.tick_params(axis="y", length=0)


def depth(inputs: Inputs, temperature: float) -> Canvas:
    """Conditional acceptance by depth, and how many tokens a round produces."""
    rows = speculative(inputs, temperature)
    canvas, (left, right) = subplots(1, 2, WIDTH, 3.4)
    for row in rows:
        rates = row["acceptance_by_depth"]
        line = line_of(row["method"], inputs.methods)
        left.plot(range(len(rates)), rates, label=row["method"], **line)
        counts = row["acceptance_histogram"]
        shares = [count / row["rounds"] for count in counts[1:]]
        right.plot(range(1, len(counts)), shares, **line)
    left.set_title("Acceptance given all earlier accepted", loc="left")
    left.set_xlabel("draft depth")
    left.set_ylim(0, 1.03)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_title("Tokens produced by a round", loc="left")
    right.set_xlabel("tokens, the bonus token included")
    right.set_ylabel("share of rounds")
    right.set_ylim(bottom=0)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    canvas.legend(loc="outside lower center", ncols=min(len(rows), 4))
    return canvas


def context(inputs: Inputs, temperature: float) -> Canvas:
    """τ by context length."""
    canvas, (axis,) = subplots(1, 1, WIDTH, 3.2)
    rows = speculative(inputs, temperature)
    highs = {item["low"]: item["high"] for row in rows for item in row["tau_by_context"]}
    edges = sorted(highs)
    for row in rows:
        found = {item["low"]: item["tau"] for item in row["tau_by_context"]}
        points = [(edges.index(low), tau) for low, tau in sorted(found.items())]
        line = line_of(row["method"], inputs.methods)
        axis.plot(*zip(*points, strict=True), label=row["method"], **line)
    axis.set_xticks(range(len(edges)), [context_name(low, highs[low]) for low in edges])
    axis.set_xlabel("tokens in context when the round began")
    axis.set_ylabel("τ")
    axis.set_ylim(bottom=1)
    canvas.legend(loc="outside lower center", ncols=min(len(rows), 4))
    return canvas


def round_time(inputs: Inputs, temperature: float) -> Canvas:
    """Where a round's time goes, beside one step of vanilla and the step's worth of τ."""
    rows = speculative(inputs, temperature)
    vanilla = inputs.find("vanilla", ALL, temperature)
    canvas, (axis,) = subplots(1, 1, WIDTH, 1.5 + 0.42 * (len(rows) + 1))
    names = []
    if vanilla is not None and vanilla["decode_ms_per_token"] is not None:
        step = vanilla["decode_ms_per_token"]
        axis.barh(0, step, color=NEUTRAL, height=0.6)
        axis.axvline(step, color=NEUTRAL, linewidth=1.2, linestyle="--")
        axis.annotate(f"{step:.1f} ms", (step, 0), xytext=(6, 0), textcoords="offset points", va="center")
        names.append("vanilla step")
    for row in rows:
        left = 0.0
        for part in PARTS:
            axis.barh(
                len(names),
                row["round_ms"][part],
                left=left,
                height=0.6,
                color=PART_COLOURS[part],
                label=part if row is rows[0] else None,
            )
            left += row["round_ms"][part]
        text = f"{left:.1f} ms for {row['tau']:.2f} tokens"
        axis.annotate(
            text, (left, len(names)), xytext=(6, 0), textcoords="offset points", va="center", color=TEXT
        )
        names.append(row["method"])
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.25)
    axis.set_xlabel("milliseconds")
    canvas.legend(loc="outside lower center", ncols=len(PARTS))
    return canvas
