"""Serving engines: agreement with the native engine, and what they measured."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Table, TableCell, Tone, cells
from eagle3.report.formats import MISSING, number


def serving_agreement_table(serving: Mapping[str, Any]) -> Table:
    """Do the engines that serve the draft agree with this project's own?"""
    keys = ("tokens_equal", "acceptance_equal", "hidden_states_equal")
    return Table(
        caption="Agreement of serving engines with the native engine, token by token and round by round",
        columns=(
            "Engine",
            "Version",
            "Dtype",
            "Prompts",
            "Tokens equal",
            "Acceptance equal",
            "Hidden states equal",
        ),
        rows=tuple(
            cells(
                [
                    engine,
                    values["version"],
                    values["dtype"],
                    str(values["prompts"]),
                    *(_agreement_cell(values[key]) for key in keys),
                ]
            )
            for engine, values in serving.items()
        ),
        text_columns=frozenset({"Version", "Dtype"}),
    )


def serving_metrics_table(serving: Mapping[str, Any]) -> Table:
    """Latency, throughput and acceptance of every experiment at every level of concurrency."""
    rows = []
    for engine, values in serving.items():
        timed = values["timed"]
        for experiment in values["experiments"]:
            if "unavailable" in experiment:
                rows.append(cells([engine, experiment["name"], *[MISSING] * 6]))
                continue
            for level in experiment["levels"]:
                first, each = level["time_to_first_token_ms"], level["time_per_output_token_ms"]
                times = [
                    number(first and first["median"]),
                    number(each and each["median"]),
                    number(level["tokens_per_second"]),
                ]
                rows.append(
                    cells(
                        [
                            engine,
                            experiment["name"],
                            str(level["concurrency"]),
                            *(times if timed else ["not timed"] * 3),
                            number(level["tau"]),
                            _counters(level["counters"]),
                        ]
                    )
                )
    return Table(
        caption=(
            "Experiments on serving engines, one server after the other: τ as everywhere in this report, "
            "times as medians over the requests. An engine on stand-in kernels is not timed."
        ),
        columns=(
            "Engine",
            "Experiment",
            "In flight",
            "First token, ms",
            "Each further token, ms",
            "Tokens/s",
            "τ",
            "Server's counters",
        ),
        rows=tuple(rows),
        text_columns=frozenset({"Experiment"}),
    )


def unavailable(serving: Mapping[str, Any]) -> list[str]:
    """Why experiments could not run, one line each."""
    return [
        f"{experiment['name']} on {engine}: {experiment['unavailable']}"
        for engine, values in serving.items()
        for experiment in values["experiments"]
        if "unavailable" in experiment
    ]


def server_averages(serving: Mapping[str, Any]) -> list[str]:
    """What SGLang's own average of tokens a verification is beside that of the answers, one line each."""
    return [
        f"{experiment['name']} on {engine}: {number(average['server'])} tokens a verification by its "
        f"/server_info, {number(average['requests'])} by its answers; neither is cut off where an answer ends"
        for engine, values in serving.items()
        for experiment in values["experiments"]
        if (average := experiment.get("server_accept_length")) is not None
    ]


def _counters(counters: Mapping[str, Any]) -> TableCell:
    return TableCell("agree", Tone.GOOD) if counters["agree"] else TableCell("differ", Tone.BAD)


def _agreement_cell(value: bool | None) -> TableCell:
    if value is None:
        return TableCell("not applicable")
    return TableCell("yes", Tone.GOOD) if value else TableCell("no", Tone.BAD)
