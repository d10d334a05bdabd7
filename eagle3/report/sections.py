"""The report's sections in reading order; a result that does not exist gets no section."""

from collections.abc import Callable, Iterator

from matplotlib.figure import Figure as Canvas

from eagle3.report import figures
from eagle3.report.blocks import Block, Code, Figure, Items, Paragraph, Section, Table, Tone
from eagle3.report.comparison import grid_table, published_ablation_table, published_table
from eagle3.report.context import context_blocks
from eagle3.report.inputs import Inputs
from eagle3.report.losslessness import lossless_table, seeded_table
from eagle3.report.method import how_measured, machine_table, setting_table, subject_table
from eagle3.report.pairs import pairs_table
from eagle3.report.provenance import provenance_paragraphs
from eagle3.report.scaling import chain_depth_table, scaling_figure, scaling_table
from eagle3.report.serving import (
    server_averages,
    serving_agreement_table,
    serving_metrics_table,
    unavailable,
)
from eagle3.report.sweep import (
    best_trials_table,
    finished_trials,
    held_out_table,
    sweep_states_table,
)
from eagle3.report.sweep_figures import CAPTIONS, draw_figures
from eagle3.report.tables import (
    ALL,
    adaptive_table,
    bound_table,
    by_task_table,
    context_table,
    depth_table,
    interval_table,
    overall_table,
    round_table,
    speculative,
)
from eagle3.report.throughput import throughput_table
from eagle3.report.training import training_curves, training_table

Draw = Callable[[str, str, str, Canvas], Figure]
"""(name, caption, description, canvas) -> the figure, its PNG written."""

_LEVEL_TONES = {"ok": Tone.GOOD, "note": Tone.PLAIN, "warning": Tone.WARNING, "failure": Tone.BAD}


def build_sections(inputs: Inputs, draw: Draw) -> list[Section]:
    """All sections that have something to show."""
    parts = (
        _speedup,
        _tasks,
        _acceptance,
        _time,
        _losslessness,
        _training,
        _ablation,
        _scaling,
        _sweep,
        _context,
        _throughput,
        _serving,
        _method,
        _reproduce,
    )
    return [section for part in parts if (section := part(inputs, draw)).blocks]


def verdict_blocks(inputs: Inputs) -> tuple[Block, ...]:
    """The verdict's summary and its sentences, the worst first."""
    verdict = inputs.evaluation["verdict"]
    order = ["failure", "warning", "note", "ok"]
    checks = sorted(verdict["checks"], key=lambda check: order.index(check["level"]))
    levels = {check["level"] for check in checks}
    tone = Tone.BAD if "failure" in levels else Tone.WARNING if "warning" in levels else Tone.GOOD
    sentences = tuple(Paragraph(check["sentence"], _LEVEL_TONES[check["level"]]) for check in checks)
    return Paragraph(verdict["summary"], tone), Items(sentences)


def _speedup(inputs: Inputs, draw: Draw) -> Section:
    description = "; ".join(
        f"{row['method']} {row['speedup']:.2f} times vanilla at temperature {row['temperature']:g}"
        for temperature in inputs.temperatures
        for row in inputs.overall(temperature)
        if row["method"] != "vanilla" and row["speedup"] is not None
    )
    blocks: list[Block] = [
        draw(
            "speedup",
            "Decode speedup over vanilla, all tasks together, 95 % intervals. Right of the line is faster.",
            description,
            figures.forest(inputs),
        )
    ]
    blocks += [overall_table(inputs, temperature) for temperature in inputs.temperatures]
    blocks += _present(pairs_table(inputs))
    slower = [
        f"{row['method']} ({row['speedup']:.2f}× at T = {row['temperature']:g})"
        for temperature in inputs.temperatures
        for row in inputs.overall(temperature)
        if row["slower_than_vanilla"]
    ]
    if slower:
        blocks.append(Paragraph(f"Slower than vanilla here: {', '.join(slower)}.", Tone.BAD))
    return Section("speedup", "Speedup", tuple(blocks))


def _tasks(inputs: Inputs, draw: Draw) -> Section:
    blocks: list[Block] = []
    for temperature in inputs.temperatures:
        blocks.append(by_task_table(inputs, temperature))
        if temperature in (0.0, 1.0):
            blocks.append(published_table(sampled=temperature == 1.0))
        blocks.append(interval_table(inputs, temperature))
        if len(inputs.tasks) > 1:
            blocks.append(
                draw(
                    f"speedup-by-task-t{temperature:g}",
                    f"Decode speedup by task, T = {temperature:g}, with 95 % intervals.",
                    "The table above as a figure: one panel a task, one row a method.",
                    figures.forest_by_task(inputs, temperature),
                )
            )
    return Section("tasks", "By task, beside the paper", tuple(blocks))


def _acceptance(inputs: Inputs, draw: Draw) -> Section:
    blocks: list[Block] = []
    for temperature in inputs.temperatures:
        if not speculative(inputs, temperature):
            continue
        blocks.append(
            draw(
                f"acceptance-t{temperature:g}",
                f"Acceptance by draft depth and tokens a round, T = {temperature:g}.",
                "The tables below as a figure.",
                figures.depth(inputs, temperature),
            )
        )
        blocks += _present(depth_table(inputs, temperature))
        by_context = context_table(inputs, temperature)
        if by_context is not None:
            blocks.append(by_context)
            blocks.append(
                draw(
                    f"context-t{temperature:g}",
                    f"τ by context length, T = {temperature:g}.",
                    "The table above as a figure.",
                    figures.context(inputs, temperature),
                )
            )
    return Section("acceptance", "Acceptance", tuple(blocks))


def _time(inputs: Inputs, draw: Draw) -> Section:
    blocks: list[Block] = []
    for temperature in inputs.temperatures:
        table = round_table(inputs, temperature)
        if table is not None:
            blocks.append(
                draw(
                    f"round-t{temperature:g}",
                    f"Where the time of a verification round goes, T = {temperature:g}.",
                    "The table below as a figure, beside one step of vanilla.",
                    figures.round_time(inputs, temperature),
                )
            )
            blocks.append(table)
    blocks += _present(adaptive_table(inputs), bound_table(inputs))
    return Section("time", "Time of a round", tuple(blocks))


def _losslessness(inputs: Inputs, draw: Draw) -> Section:
    blocks: list[Block] = []
    if 0.0 in inputs.temperatures:
        tolerance = inputs.evaluation["settings"]["tie_tolerance"]
        near_tie = (
            "a first difference counts as a near tie where both tokens, and every later one, lie within "
            f"{tolerance:g} of the target's best logit; any other is a failure"
        )
        rule = near_tie if tolerance else "any difference is a failure"
        blocks = [
            Paragraph(f"Every repeat of every greedy output is compared with vanilla's; {rule}."),
            lossless_table(inputs),
        ]
    seeded = seeded_table(inputs)
    if seeded is not None:
        blocks += [
            Paragraph(
                "That each method samples from the target's own distribution is shown by the tests of this "
                "project. Beyond that, sampled outputs are compared with vanilla's for the same seed."
            ),
            seeded,
        ]
    return Section("losslessness", "Losslessness", tuple(blocks))


def _training(inputs: Inputs, draw: Draw) -> Section:
    histories = {name: rows for name, rows in inputs.training.items() if rows}
    if not histories:
        return Section("training", "Training", ())
    blocks: list[Block] = [training_table(histories)]
    for name, rows in histories.items():
        blocks.append(
            draw(
                f"training-{name}",
                f"Training of the draft {name}. Dashed: the checkpoint that was kept.",
                f"Curves of {len(rows)} logged steps, one panel a metric.",
                training_curves(rows),
            )
        )
    return Section("training", "Training", tuple(blocks))


def _ablation(inputs: Inputs, draw: Draw) -> Section:
    if inputs.ablation is None:
        return Section("ablation", "Ablation", ())
    table = grid_table(
        inputs.ablation["results"], "Ablation, measured here: decode speedup and τ", "Variant", "method"
    )
    provenance = provenance_paragraphs(inputs, inputs.ablation)
    return Section("ablation", "Ablation", (*provenance, table, published_ablation_table()))


def _scaling(inputs: Inputs, draw: Draw) -> Section:
    if inputs.scaling is None:
        return Section("scaling", "Scaling", ())
    results = [row for row in inputs.scaling["results"] if row["task"] == ALL]
    figure = draw(
        "scaling", "τ and decode speedup against training data.", "The table below.", scaling_figure(results)
    )
    provenance = provenance_paragraphs(inputs, inputs.scaling)
    tables = scaling_table(results), chain_depth_table(results)
    return Section("scaling", "More training data", (*provenance, figure, *tables))


def _sweep(inputs: Inputs, draw: Draw) -> Section:
    if inputs.sweep is None:
        return Section("sweep", "Sweep", ())
    blocks: list[Block] = list(
        provenance_paragraphs(
            inputs,
            {**inputs.sweep.get("identity", {}), "origin": inputs.sweep.get("origin")},
            same_drafts=True,
        )
    )
    if inputs.sweep.get("summary"):
        blocks.append(Paragraph(inputs.sweep["summary"]))
    if inputs.sweep.get("reservations"):
        blocks.append(Items(tuple(Paragraph(sentence) for sentence in inputs.sweep["reservations"])))
    for name, canvas in draw_figures(inputs.sweep).items():
        blocks.append(
            draw(f"sweep-{name.replace('_', '-')}", CAPTIONS[name], "Drawn from sweep.json.", canvas)
        )
    if finished_trials(inputs.sweep):
        blocks.append(best_trials_table(inputs.sweep))
    blocks.append(sweep_states_table(inputs.sweep))
    if inputs.sweep.get("held_out"):
        blocks.append(held_out_table(inputs.sweep))
    return Section("sweep", "Sweep of tree parameters", tuple(blocks))


def _context(inputs: Inputs, draw: Draw) -> Section:
    if inputs.context is None:
        return Section("context", "Context length", ())
    provenance = provenance_paragraphs(inputs, inputs.context, same_drafts=True)
    return Section("context", "Context length", (*provenance, *context_blocks(inputs.context)))


def _throughput(inputs: Inputs, draw: Draw) -> Section:
    if inputs.throughput is None:
        return Section("throughput", "Batch sizes", ())
    provenance = provenance_paragraphs(inputs, inputs.throughput, same_drafts=True)
    return Section("throughput", "Batch sizes", (*provenance, throughput_table(inputs.throughput)))


def _serving(inputs: Inputs, draw: Draw) -> Section:
    if inputs.serving is None:
        return Section("serving", "Serving", ())
    serving = inputs.serving
    provenance: list[Block] = []
    for engine, part in serving.items():
        made = {**part, **part.get("origin", {})}
        provenance += [
            Paragraph(f"{engine}: {block.text}", block.tone)
            for block in provenance_paragraphs(inputs, made, same_drafts=True)
        ]
    further = [Paragraph(line) for line in (*server_averages(serving), *unavailable(serving))]
    tables = serving_agreement_table(serving), serving_metrics_table(serving)
    return Section("serving", "Serving engines", (*provenance, *tables, *further))


def _method(inputs: Inputs, draw: Draw) -> Section:
    tables = (subject_table(inputs), machine_table(inputs), setting_table(inputs))
    return Section("method", "What was measured, and how", (*how_measured(inputs), *tables))


def _reproduce(inputs: Inputs, draw: Draw) -> Section:
    origin = inputs.evaluation["settings"]["origin"]
    commands = []
    commit = origin.get("commit")
    if commit and commit != "unknown":
        commands.append(f"git checkout {commit}")
    commands.append(inputs.command)
    blocks: list[Block] = [Code("\n".join(commands))]
    if origin.get("dirty"):
        blocks.append(
            Paragraph(
                "The working tree had changes that this commit does not hold: these numbers cannot be "
                "reproduced from it alone.",
                Tone.WARNING,
            )
        )
    return Section("reproduce", "Reproduce", tuple(blocks))


def _present(*tables: Table | None) -> Iterator[Table]:
    return (table for table in tables if table is not None)
