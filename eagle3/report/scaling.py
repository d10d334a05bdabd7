"""τ and speedup against the amount of training data."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas

from eagle3.report.blocks import Table, cells
from eagle3.report.formats import MARKS_NOTE, MISSING, number, speedup_cell
from eagle3.report.style import COLOURS, NEUTRAL, WIDTH, subplots


def scaling_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """τ and speedup by amount of training data."""
    ordered = sorted(results, key=lambda row: (row["method"], row["train_tokens"]))
    return Table(
        caption="τ and decode speedup by training data",
        columns=("Method", "Training tokens", "τ", "Decode speedup (95 % interval)"),
        rows=tuple(
            cells([row["method"], f"{row['train_tokens']:,}", number(row["tau"]), speedup_cell(row)])
            for row in ordered
        ),
        note=MARKS_NOTE,
    )


def chain_depth_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Acceptance by depth of chains (n-α), each method at its largest amount of data."""
    most = {
        row["method"]: row["train_tokens"] for row in sorted(results, key=lambda row: row["train_tokens"])
    }
    rows = [row for row in results if row["train_tokens"] == most[row["method"]]]
    depths = max(len(row["acceptance_by_depth"]) for row in rows)
    return Table(
        caption="Acceptance of a chain's drafts by depth (n-α), given that all before were accepted",
        columns=("Method", "Training tokens", *(f"{depth}-α" for depth in range(depths))),
        rows=tuple(
            cells(
                [
                    row["method"],
                    f"{row['train_tokens']:,}",
                    *(f"{rate:.1%}" for rate in row["acceptance_by_depth"]),
                    *[MISSING] * (depths - len(row["acceptance_by_depth"])),
                ]
            )
            for row in rows
        ),
    )


def scaling_figure(results: Sequence[Mapping[str, Any]]) -> Canvas:
    """The paper's central figure: more data, longer acceptance, on a logarithmic axis of data."""
    canvas, axes = subplots(1, 2, WIDTH, 3.3)
    amounts = sorted({row["train_tokens"] for row in results})
    for index, method in enumerate(dict.fromkeys(row["method"] for row in results)):
        rows = sorted(
            (row for row in results if row["method"] == method), key=lambda row: row["train_tokens"]
        )
        tokens = [row["train_tokens"] for row in rows]
        colour = COLOURS[index % len(COLOURS)]
        axes[0].plot(tokens, [row["tau"] for row in rows], "o-", color=colour, label=method)
        axes[1].plot(tokens, [row["speedup"] for row in rows], "o-", color=colour)
        bounded = [row for row in rows if row.get("speedup_low") is not None]
        axes[1].fill_between(
            [row["train_tokens"] for row in bounded],
            [row["speedup_low"] for row in bounded],
            [row["speedup_high"] for row in bounded],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    for axis, label in zip(axes, ("τ", "decode speedup"), strict=True):
        axis.set_xscale("log")
        axis.set_xticks(amounts, [compact(amount) for amount in amounts])
        axis.minorticks_off()
        axis.set_xlabel("training tokens")
        axis.set_title(label, loc="left")
    axes[1].axhline(1.0, color=NEUTRAL, linewidth=1.2, linestyle="--")
    canvas.legend(loc="outside lower center", ncols=4)
    return canvas


def compact(amount: float) -> str:
    """ "50k", "1.6M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"{amount / size:.3g}{unit}"
    return f"{amount:.0f}"
