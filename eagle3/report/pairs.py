"""Methods of one evaluation against each other, beside vanilla."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Table, cells
from eagle3.report.formats import interval, temperature_text
from eagle3.report.inputs import Inputs
from eagle3.report.tables import ALL

# Between runs of the same drafts, vanilla's ratio to a method has moved by 4 % (docs/log.md).
LEAST = 0.05


def pairs_table(inputs: Inputs) -> Table | None:
    """Each method that has to win against another one beside it; None where there are no such pairs."""
    pairs = inputs.evaluation.get("pairs")
    if not pairs:
        return None
    body = []
    for pair in pairs:
        verdict = _verdict(pair, _margin(inputs, pair["temperature"]))
        at = temperature_text(pair["temperature"])
        body.append(cells([pair["method"], pair["over"], at, interval(pair, "speedup"), verdict]))
    return Table(
        caption="Methods against each other, all tasks together",
        columns=("Method", "Against", "Temperature", "Decode speedup over it", "Verdict"),
        rows=tuple(body),
        note=(
            f"Paired by prompt, 95 % intervals. {len(pairs)} comparisons, not corrected for their number. An "
            f"interval has to lie outside of {1 - LEAST:.2f} to {1 + LEAST:.2f}, as two runs of the same "
            "drafts differ by as much (and outside of the A/A arm's distance from 1, where that is larger). "
            "A method is worth keeping where it wins."
        ),
        text_columns=frozenset({"Against", "Temperature", "Verdict"}),
    )


def _margin(inputs: Inputs, temperature: float) -> float:
    """What a difference has to exceed: what lies between runs, or the A/A arm's distance from 1."""
    again = inputs.find("vanilla-aa", ALL, temperature)
    return max(LEAST, abs(again["speedup"] - 1.0) if again and again["speedup"] is not None else 0.0)


def _verdict(pair: Mapping[str, Any], margin: float) -> str:
    low, high = pair["speedup_low"], pair["speedup_high"]
    if low is None or (1.0 - margin <= high and low <= 1.0 + margin):
        return "not told apart"
    return "wins" if low > 1.0 + margin else "loses"
