"""Tables beside the paper's: its Table 1 and its ablation, and our own variants in the same shape."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.report.blocks import Table, TableCell, cells
from eagle3.report.formats import MISSING, number, speedup_cell
from eagle3.report.published import (
    ABLATION,
    ABLATION_TASKS,
    SOURCE,
    TABLE_1_GREEDY,
    TABLE_1_SAMPLED,
    TASKS,
    Published,
)
from eagle3.report.tables import task_name


def published_table(sampled: bool) -> Table:
    """The paper's Table 1; at temperature 1 its means."""
    rows = TABLE_1_SAMPLED if sampled else TABLE_1_GREEDY
    columns = ("mean",) if sampled else TASKS
    return Table(
        caption=f"Published ({SOURCE}, Table 1), T = {1 if sampled else 0}: speedup / τ",
        columns=("Target", "Method", *columns),
        rows=tuple(_published_row(row) for row in rows),
        note=(
            "Other targets, drafts trained on hundreds of thousands of chats, and GPUs: the order of the "
            "methods can be compared with the table above, the numbers cannot."
        ),
        text_columns=frozenset({"Method"}),
    )


def _published_row(row: Published) -> tuple[TableCell, ...]:
    return cells([row.target, row.method, *(f"{speedup:.2f}× / {tau:.2f}" for speedup, tau in row.values)])


def published_ablation_table() -> Table:
    """The paper's ablation."""
    return Table(
        caption=f"Published ablation ({SOURCE}), {ABLATION[0].target}: speedup / τ",
        columns=("Variant", *ABLATION_TASKS),
        rows=tuple(
            cells([row.method, *(f"{speedup:.2f}× / {tau:.2f}" for speedup, tau in row.values)])
            for row in ABLATION
        ),
    )


def grid_table(results: Sequence[Mapping[str, Any]], caption: str, first: str, key: str) -> Table:
    """Rows by `key`, columns by task, speedup with interval / τ."""
    tasks = list(dict.fromkeys(row["task"] for row in results))
    found = {(row[key], row["task"]): row for row in results}
    names = list(dict.fromkeys(row[key] for row in results))
    return Table(
        caption=caption,
        columns=(first, *(task_name(task) for task in tasks)),
        rows=tuple(
            cells([str(name), *(_grid_cell(found.get((name, task))) for task in tasks)]) for name in names
        ),
    )


def _grid_cell(row: Mapping[str, Any] | None) -> TableCell:
    if row is None:
        return TableCell(MISSING)
    cell = speedup_cell({"method": "", **row})
    return TableCell(f"{cell.text}, τ {number(row.get('tau'))}", cell.tone)
