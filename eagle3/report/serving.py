"""Serving engines: agreement with the native engine, and what they measured."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Table, TableCell, Tone, cells
from eagle3.report.formats import MISSING, number


def serving_agreement_table(serving: Mapping[str, Any]) -> Table:
    """Do the engines that serve the draft agree with this project's own?"""
    keys = ("tokens_equal", "acceptance_equal", "hidden_states_equal")
    return Table(
        caption="Agreement of serving engines with the native engine",
        columns=("Engine", "Version", "Prompts", "Tokens equal", "Acceptance equal", "Hidden states equal"),
        rows=tuple(
            cells(
                [
                    engine,
                    str(values.get("version", MISSING)),
                    str(values.get("prompts", MISSING)),
                    *(_agreement_cell(values.get(key), values.get("prompts")) for key in keys),
                ]
            )
            for engine, values in _engines(serving)
        ),
    )


def _agreement_cell(value: bool | int | None, prompts: int | None) -> TableCell:
    """True or False, or how many of the prompts agree."""
    if value is None:
        return TableCell("not applicable")
    agrees = value if isinstance(value, bool) else value == prompts
    text = ("yes" if value else "no") if isinstance(value, bool) else f"{value} of {prompts}"
    return TableCell(text, Tone.GOOD if agrees else Tone.BAD)


def serving_metrics_table(serving: Mapping[str, Any]) -> Table | None:
    """Metrics of every experiment on every engine; None where there are none."""
    rows = [
        (engine, name, metrics)
        for engine, values in _engines(serving)
        for name, metrics in _experiments(values.get("experiments"))
    ]
    keys = list(dict.fromkeys(key for _, _, metrics in rows for key in metrics if _is_number(metrics[key])))
    if not keys:
        return None
    return Table(
        caption="Experiments on serving engines",
        columns=("Engine", "Experiment", *(key.replace("_", " ") for key in keys)),
        rows=tuple(
            cells([engine, name, *(number(metrics.get(key)) for key in keys)])
            for engine, name, metrics in rows
        ),
        text_columns=frozenset({"Experiment"}),
    )


def _engines(serving: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, values) for name, values in serving.items() if isinstance(values, Mapping)]


def _experiments(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """A mapping by name, or a list of rows with a name."""
    if isinstance(value, Mapping):
        return list(value.items())
    return [(str(row["name"]), row) for row in value or []]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
