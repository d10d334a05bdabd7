"""How figures look: one colour a method everywhere, text that follows the page's light or dark colours."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

# Distinguishable with colour-blind eyes, and readable on white and on dark grey.
COLOURS = (
    "#2f7ed8",
    "#e0702d",
    "#1f9d78",
    "#c0569f",
    "#c99a1a",
    "#7a6fd0",
    "#b5533c",
    "#6d8f2f",
    "#3aa6b9",
    "#a0745a",
)
NEUTRAL = "#8a8f98"
_LINES = (("o", "-"), ("s", "--"), ("^", ":"))
# Stands for the colour of text: black in PNG, the page's own in SVG.
TEXT = "#010203"
# Of every figure, in inches: the width of the page's text at 96 dots an inch.
WIDTH = 9.4

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#8a8f98",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.8,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": NEUTRAL,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}


def colour_of(name: str, names: Sequence[str]) -> str:
    """The colour of a method: grey for vanilla, the others in the order of the evaluation."""
    place = _place(name, names)
    return NEUTRAL if place is None else COLOURS[place % len(COLOURS)]


def line_of(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Colour, marker and dashes of a method's line: those beyond the last colour differ by the latter two."""
    marker, dashes = _LINES[(_place(name, names) or 0) // len(COLOURS) % len(_LINES)]
    return {"color": colour_of(name, names), "marker": marker, "linestyle": dashes}


def _place(name: str, names: Sequence[str]) -> int | None:
    """Of a method among those that draft, in the order of the evaluation; None for vanilla."""
    drafting = [item for item in names if item not in ("vanilla", "vanilla-aa")]
    return drafting.index(name) if name in drafting else None


@contextmanager
def styled() -> Iterator[None]:
    """Draw within this block with the report's style; the caller's settings are left alone."""
    with mpl.rc_context(_STYLE):
        yield


def subplots(
    rows: int, columns: int, width: float, height: float, share_x: bool = False
) -> tuple[Canvas, list[Axes]]:
    """A canvas of `width` x `height` inches and its axes, row by row; free of pyplot's global state."""
    canvas = Canvas(figsize=(width, height), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False, sharex=share_x)
    return canvas, list(axes.flat)


def to_svg(canvas: Canvas, name: str) -> str:
    """The figure as an `<svg>` element: equal bytes for equal data, text in the page's colour."""
    stream = StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.id": f"plot-{name}"}):
        FigureCanvasSVG(canvas).print_svg(stream, metadata={"Date": None, "Creator": None})
    # The layout is done; the PNG takes it over instead of working it out again.
    canvas.set_layout_engine("none")
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # matplotlib numbers its groups from 1 in each figure; on one page the ids would collide.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace(TEXT, "currentColor").replace("'DejaVu Sans'", "system-ui, sans-serif").strip()


def write_png(canvas: Canvas, path: Path) -> None:
    """The figure on white, for Markdown viewers. Equal bytes for equal data."""
    stream = BytesIO()
    canvas.set_facecolor("white")
    canvas.set_dpi(130)
    FigureCanvasAgg(canvas).print_png(stream, metadata={"Software": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stream.getvalue())
