"""Outputs beside vanilla's: greedy ones, and sampled ones that were given the same seed."""

from typing import Any

from eagle3.report.blocks import Table, TableCell, Tone, cells
from eagle3.report.inputs import Inputs


def lossless_table(inputs: Inputs) -> Table:
    """Every output compared with vanilla's, greedy ones only."""
    rows = [row for row in inputs.overall(0.0) if row["method"] != "vanilla"]
    body = []
    for row in rows:
        counts = row["lossless"]
        failures = str(counts["failures"])
        body.append(
            cells(
                [
                    row["method"],
                    f"{counts['compared']:,}",
                    f"{counts['exact']:,}",
                    str(counts["near_ties"]),
                    TableCell(failures, Tone.BAD if counts["failures"] else Tone.GOOD),
                    "yes" if row["repeatable"] else TableCell("no", Tone.WARNING),
                ]
            )
        )
    return Table(
        caption="Outputs compared with vanilla's, token by token",
        columns=("Method", "Compared", "Equal", "Near ties", "Failures", "Repeats equal"),
        rows=tuple(body),
    )


def seeded_table(inputs: Inputs) -> Table | None:
    """Sampled outputs that are vanilla's own for the same seed; None where nothing was sampled.

    Drafts that are chosen and not sampled take no random number: every token is the one that vanilla draws,
    where its logits are vanilla's. A method that samples its drafts gives other tokens of the same
    distribution.
    """
    frame = inputs.per_prompt
    sampled = frame[(frame["temperature"] > 0) & (frame["turn"] == 0)]
    if sampled.empty:
        return None
    outputs: dict[str, dict[tuple[Any, ...], list[int]]] = {}
    columns = (sampled[name] for name in ("method", "task", "prompt_id", "temperature", "token_ids"))
    for method, *place, token_ids in zip(*columns, strict=True):
        outputs.setdefault(method, {})[tuple(place)] = list(token_ids)
    vanilla = outputs["vanilla"]
    body = []
    for method in inputs.methods:
        if method == "vanilla":
            continue
        mine = outputs[method]
        equal = sum(token_ids == vanilla[place] for place, token_ids in mine.items())
        body.append(cells([method, f"{len(mine):,}", f"{equal:,}"]))
    return Table(
        caption=(
            "Sampled first turns that are token by token vanilla's for the same seed. Speculative sampling "
            "draws its drafts, so that its tokens are others of the same distribution."
        ),
        columns=("Method", "Sampled", "Equal"),
        rows=tuple(body),
    )
