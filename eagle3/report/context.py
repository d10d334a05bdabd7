"""Acceptance by context length, beyond what the drafts were trained on."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Block, Paragraph, Table, Tone, cells
from eagle3.report.formats import tree_text

# A draft that keeps less than this of its gain beyond its training length is said to collapse there.
_KEPT_SHARE = 0.5


def context_blocks(context: Mapping[str, Any]) -> list[Block]:
    """τ of every draft by prompt length, and a warning for a draft that fails on long contexts."""
    results, limit = context["results"], context["longest_training_row"]
    lengths = sorted({row["length"] for row in results})
    taus: dict[str, dict[int, float]] = {}
    for row in results:
        taus.setdefault(row["draft"], {})[row["length"]] = row["tau"]
    columns = [f"{length}" + (" (longer)" if length > limit else "") for length in lengths]
    table = Table(
        caption=f"τ by tokens of prompt, {tree_text(context['tree'])}",
        columns=("Draft", *columns),
        rows=tuple(
            cells([name, *(f"{found[length]:.2f}" if length in found else "–" for length in lengths)])
            for name, found in taus.items()
        ),
        note=(
            f"Joined articles to summarise, {context['prompts']} prompts a length, {context['tokens']} new "
            "tokens, greedy, in float32 all outputs vanilla's. Longer: than the longest training row, "
            f"{limit} tokens."
        ),
    )
    return [*(Paragraph(text, Tone.WARNING) for text in collapses(taus, limit)), table]


def collapses(taus: Mapping[str, Mapping[int, float]], limit: int) -> list[str]:
    """A sentence for each draft whose gain, τ - 1, falls by half or more beyond `limit` tokens."""
    found = []
    for name, by_length in taus.items():
        within = [tau for length, tau in by_length.items() if length <= limit]
        beyond = [tau for length, tau in by_length.items() if length > limit]
        if within and beyond and min(beyond) - 1 < _KEPT_SHARE * (max(within) - 1):
            found.append(
                f"{name} fails on long contexts: τ falls from {max(within):.2f} within its training length "
                f"to {min(beyond):.2f} beyond it. Train it on longer rows: raise regenerate.max_length and "
                "train.max_length."
            )
    return found
