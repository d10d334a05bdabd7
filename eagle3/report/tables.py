"""Tables of the evaluation: over all tasks, by task as in the paper, acceptance, time, losslessness."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Table, TableCell, Tone, cells
from eagle3.report.formats import (
    MARKS_NOTE,
    MISSING,
    SLOWER,
    number,
    percent,
    speedup_cell,
    temperature_text,
    tree_text,
)
from eagle3.report.inputs import Inputs, Row
from eagle3.report.published import TASK_NAMES

ALL = "all"


def task_name(task: str) -> str:
    """A task's name as people write it."""
    return TASK_NAMES.get(task, task)


def overall_table(inputs: Inputs, temperature: float) -> Table:
    """Every method over all tasks together, the fastest in bold."""
    rows = inputs.overall(temperature)
    fastest = best_row(inputs, ALL, temperature)
    body = []
    for row in rows:
        speedup = speedup_cell(row)
        body.append(
            cells(
                [
                    TableCell(row["method"], Tone.STRONG if row is fastest else Tone.PLAIN),
                    tree_text(row["tree"]),
                    speedup,
                    speedup_cell(row, "end_to_end_speedup"),
                    number(row["tau"]),
                    number(row["tokens_per_second"], 1),
                    number(row["decode_ms_per_token"], 2),
                    number(row["prefill_ms"], 1),
                    _lossless_cell(row),
                ]
            )
        )
    first = rows[0]
    return Table(
        caption=f"All tasks together, {temperature_text(temperature)}",
        columns=(
            *("Method", "Tree", "Decode speedup", "End-to-end speedup"),
            *("τ", "Tokens/s", "ms/token", "Prefill, ms", "Lossless"),
        ),
        rows=tuple(body),
        note=(
            f"{first['prompts']} prompts, {first['generations']} generations a method, {first['dtype']}. "
            "Brackets: 95 % intervals. Tree: num_steps / topk / num_draft_tokens. vanilla-aa is vanilla "
            "measured a second time: its distance from 1 is the error of the method of measuring. "
            + MARKS_NOTE
        ),
        text_columns=frozenset({"Lossless"}),
    )


def candidates(inputs: Inputs, task: str, temperature: float) -> list[Row]:
    """The rows that the fastest is chosen from: of methods that change no token, and have a speedup."""
    return [
        row
        for row in inputs.results
        if (row["task"], row["temperature"]) == (task, temperature)
        and row["method"] not in {"vanilla", "vanilla-aa", *inputs.changes_tokens}
        and row["speedup"] is not None
    ]


def best_row(inputs: Inputs, task: str, temperature: float) -> Row | None:
    """The fastest of the candidates; None without one."""
    rows = candidates(inputs, task, temperature)
    return max(rows, key=lambda row: row["speedup"], default=None)


def _lossless_cell(row: Row) -> TableCell:
    counts = row["lossless"]
    if row["method"] == "vanilla":
        return TableCell("reference")
    if not counts["compared"]:
        return TableCell("sampled")
    if counts["failures"]:
        return TableCell(f"{counts['failures']} differ", Tone.BAD)
    ties = f", {counts['near_ties']} near ties" if counts["near_ties"] else ""
    return TableCell(f"{counts['compared']} of {counts['compared']}{ties}", Tone.GOOD)


def by_task_table(inputs: Inputs, temperature: float) -> Table:
    """Methods x tasks, speedup / τ: the shape of the paper's Table 1. The best of a column is bold."""
    tasks = [*inputs.tasks, ALL]
    best = {task: best_row(inputs, task, temperature) for task in tasks}
    body = []
    for method in inputs.methods:
        found = [inputs.find(method, task, temperature) for task in tasks]
        body.append(
            cells([method, *(_pair(row, row is not None and row is best[row["task"]]) for row in found)])
        )
    return Table(
        caption=f"Measured here, {temperature_text(temperature)}: decode speedup / τ by task",
        columns=("Method", *(task_name(task) for task in tasks)),
        rows=tuple(body),
        note=f"Bold: the fastest of the column that changes no token. {SLOWER} slower than vanilla.",
    )


def _pair(row: Row | None, best: bool) -> TableCell:
    if row is None or row["speedup"] is None:
        return TableCell(MISSING)
    text = f"{row['speedup']:.2f}× / {number(row['tau'])}"
    if row["slower_than_vanilla"]:
        return TableCell(f"{text} {SLOWER}", Tone.BAD)
    return TableCell(text, Tone.STRONG if best else Tone.PLAIN)


def interval_table(inputs: Inputs, temperature: float) -> Table:
    """The interval of every method and task."""
    tasks = [*inputs.tasks, ALL]
    body = []
    for method in inputs.methods:
        found = [inputs.find(method, task, temperature) for task in tasks]
        body.append(cells([method, *(speedup_cell(row) if row else MISSING for row in found)]))
    return Table(
        caption=f"Decode speedup with 95 % intervals by task, {temperature_text(temperature)}",
        columns=("Method", *(task_name(task) for task in tasks)),
        rows=tuple(body),
        note=MARKS_NOTE,
    )


def speculative(inputs: Inputs, temperature: float) -> list[Row]:
    """The rows over all tasks of methods that draft."""
    return [row for row in inputs.overall(temperature) if row["rounds"]]


def depth_table(inputs: Inputs, temperature: float) -> Table | None:
    """Conditional acceptance by depth; None where no method drafted."""
    rows = speculative(inputs, temperature)
    depth = max((len(row["acceptance_by_depth"]) for row in rows), default=0)
    if not depth:
        return None
    body = []
    for row in rows:
        rates = [
            f"{percent(rate)} of {reached:,}"
            for rate, reached in zip(row["acceptance_by_depth"], row["acceptance_reached"], strict=True)
        ]
        body.append(cells([row["method"], number(row["tau"]), *rates, *[MISSING] * (depth - len(rates))]))
    return Table(
        caption=f"Acceptance by depth, {temperature_text(temperature)}",
        columns=("Method", "τ", *(f"{index}-α" for index in range(depth))),
        rows=tuple(body),
        note=(
            "n-α: share of rounds whose draft at depth n was accepted, and of how many: those that drafted "
            "that deep and accepted all drafts before. In a tree any node of the depth counts, so a tree's "
            "figures lie above a chain's."
        ),
    )


def context_table(inputs: Inputs, temperature: float) -> Table | None:
    """τ by context length; None where all rounds fall into one bucket."""
    rows = speculative(inputs, temperature)
    buckets = sorted(
        {(item["low"], item["high"]) for row in rows for item in row["tau_by_context"]}, key=_low
    )
    if len(buckets) < 2:
        return None
    body = []
    for row in rows:
        found = {(item["low"], item["high"]): item for item in row["tau_by_context"]}
        body.append(
            cells(
                [
                    row["method"],
                    *(
                        f"{found[bucket]['tau']:.2f} ({found[bucket]['rounds']:,})"
                        if bucket in found
                        else MISSING
                        for bucket in buckets
                    ),
                ]
            )
        )
    return Table(
        caption=f"τ by context length (rounds in brackets), {temperature_text(temperature)}",
        columns=("Method", *(context_name(low, high) for low, high in buckets)),
        rows=tuple(body),
        note="Tokens in context, prompt and answer so far, when the round began.",
    )


def _low(bucket: tuple[int, int | None]) -> int:
    return bucket[0]


def context_name(low: int, high: int | None) -> str:
    """ "128 to 255 tokens"."""
    return f"{low}+ tokens" if high is None else f"{low} to {high - 1}"


PARTS = ("draft", "verify", "accept", "cache", "other")


def round_table(inputs: Inputs, temperature: float) -> Table | None:
    """Where a verification round's time goes; None where no method drafted."""
    rows = speculative(inputs, temperature)
    if not rows:
        return None
    vanilla = inputs.find("vanilla", ALL, temperature)
    step = vanilla["decode_ms_per_token"] if vanilla else None
    body = []
    for row in rows:
        total = sum(row["round_ms"].values())
        verify = row["round_ms"]["verify"] / step if step else None
        body.append(
            cells(
                [
                    row["method"],
                    number(total, 2),
                    *(f"{row['round_ms'][part]:.2f} ({row['round_ms'][part] / total:.0%})" for part in PARTS),
                    number(verify),
                    number(total / step if step else None),
                ]
            )
        )
    return Table(
        caption=f"Time of a mean round in ms, {temperature_text(temperature)}",
        columns=("Method", "Round", *(part.capitalize() for part in PARTS), "Verify / step", "Round / step"),
        rows=tuple(body),
        note=(
            f"A step is one token of vanilla ({number(step)} ms). A method is faster than vanilla where its "
            "τ is larger than the last column. Other: the engine's own time between the parts."
        ),
    )


def bound_table(inputs: Inputs) -> Table | None:
    """What memory and arithmetic of the machine allow, beside what was measured; None where not measured."""
    bound = inputs.evaluation["settings"]["origin"].get("bound")
    vanilla = inputs.find("vanilla", ALL, inputs.temperatures[0])
    if not bound or vanilla is None:
        return None
    step, lowest = vanilla["decode_ms_per_token"], bound["read_ms"]
    rows = [
        ("Weights read for every forward", f"{bound['weights_mb']:,.0f} MB"),
        ("Memory read by this machine", f"{bound['bandwidth_gb_s']:.1f} GB/s"),
        ("Arithmetic of this machine (matrix product)", f"{bound['arithmetic_gflop_s']:.0f} GFLOP/s"),
        ("Reading them takes about", f"{lowest:.1f} ms"),
        ("A step of vanilla, measured", f"{step:.1f} ms, {lowest / step:.0%} of it reading"),
        ("The arithmetic of one verified token takes about", f"{bound['arithmetic_ms_per_token']:.2f} ms"),
        (
            "Tokens whose arithmetic fits into the time of reading",
            f"{lowest / bound['arithmetic_ms_per_token']:.0f}",
        ),
    ]
    return Table(
        caption="The bound that memory and arithmetic set",
        columns=("What", "Value"),
        rows=tuple(cells(list(row)) for row in rows),
        note=(
            "Measured before the evaluation, the best of some runs. Speculation gains from the gap between "
            "the two: up to that many tokens, verifying could be nearly free; beyond, each costs its "
            "arithmetic."
        ),
        text_columns=frozenset({"What"}),
    )


def adaptive_table(inputs: Inputs) -> Table | None:
    """The costs that adaptive trees were sized with; None where there are none."""
    costs = inputs.evaluation["settings"]["origin"].get("adaptive_costs_ms")
    if not costs:
        return None
    sizes = range(1, 1 + max(len(values["verify"]) for values in costs.values()))
    return Table(
        caption="Costs that adaptive trees are sized with, in ms",
        columns=("Method", "Draft step", "Fixed", *(f"Verify {size}" for size in sizes)),
        rows=tuple(
            cells(
                [
                    name,
                    number(values["draft_step"]),
                    number(values["fixed"]),
                    *(number(value, 1) for value in values["verify"]),
                    *[MISSING] * (len(sizes) - len(values["verify"])),
                ]
            )
            for name, values in costs.items()
        ),
    )


def key_value_table(caption: str, values: Mapping[str, Any], names: tuple[str, str]) -> Table:
    """Nested values as dotted names and texts."""
    body = tuple(cells([key, value]) for key, value in flatten(values))
    return Table(caption=caption, columns=names, rows=body, text_columns=frozenset(names))


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) pairs; empty values are left out."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            if value:
                pairs.append((name, ", ".join(str(item) for item in value)))
        elif value is not None and value != "":
            pairs.append((name, "yes" if value is True else "no" if value is False else str(value)))
    return pairs
