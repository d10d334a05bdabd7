"""Speedup by batch size."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Table, cells
from eagle3.report.formats import tree_text


def throughput_table(throughput: Mapping[str, Any]) -> Table:
    """Tokens a second of vanilla and of the draft, and their ratio."""
    rows = tuple(
        cells(
            [
                str(row["batch_size"]),
                f"{row['vanilla_tokens_per_second']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}× ({row['speedup_lowest']:.2f} to {row['speedup_highest']:.2f})",
            ]
        )
        for row in throughput["results"]
    )
    return Table(
        caption=f"Decode throughput by batch size: {throughput['draft']}, {tree_text(throughput['tree'])}",
        columns=("Rows decoded together", "Vanilla, tokens/s", "Speculative, tokens/s", "Speedup"),
        rows=rows,
        note=(
            f"Medians of {throughput['repeats']} interleaved repeats, lowest and highest ratio in brackets; "
            f"the same prompts for every size, {throughput['tokens']} tokens each, greedy; in float32 "
            "equal tokens are checked."
        ),
    )
