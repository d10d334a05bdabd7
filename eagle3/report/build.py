"""Build the report: reports/index.html, reports/README.md and reports/figures/."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from eagle3.provenance import write_text
from eagle3.report.blocks import Figure
from eagle3.report.formats import interval, number
from eagle3.report.html import render_html
from eagle3.report.inputs import Inputs, read_inputs
from eagle3.report.markdown import render_markdown
from eagle3.report.method import moment
from eagle3.report.sections import build_sections, verdict_blocks
from eagle3.report.style import styled, to_svg, write_png
from eagle3.report.tables import ALL, best_row, candidates, task_name

TITLE = "Speculative decoding: comparison report"


def build(
    reports: Path,
    *,
    training: Mapping[str, Path] | None = None,
    target: Mapping[str, Any] | None = None,
    drafts: Mapping[str, Mapping[str, Any]] | None = None,
    command: str = "make repro",
) -> list[Path]:
    """Write the report from what lies in `reports` and the trainings' histories.

    Args:
        reports: holds evaluation.json and per_prompt.parquet, and may hold ablation.json, scaling.json,
            sweep.json, serving.json, throughput.json and context.json; what is missing gets no section. The
            report is written beside them.
        training: metrics.jsonl of each draft; a file that does not exist is left out.
        target: the target's manifest.
        drafts: each draft's manifest.
        command: what reproduces the report.

    Returns:
        The files written.

    Raises:
        ValueError: if the evaluation is missing or a file cannot be read.
    """
    inputs = read_inputs(reports, training or {}, target or {}, drafts or {}, command)
    folder = reports / "figures"
    shutil.rmtree(folder, ignore_errors=True)
    written: list[Path] = []

    def draw(name: str, caption: str, description: str, canvas: Canvas) -> Figure:
        svg = to_svg(canvas, name)
        path = folder / f"{name}.png"
        write_png(canvas, path)
        written.append(path)
        return Figure(name, caption, description, svg)

    with styled():
        sections = build_sections(inputs, draw)
    verdict = verdict_blocks(inputs)
    lead = headline(inputs)
    pages = {
        "index.html": render_html(TITLE, lead, facts(inputs), verdict, sections),
        "README.md": render_markdown(TITLE, lead, verdict, sections),
    }
    for name, text in pages.items():
        write_text(reports / name, text)
        written.append(reports / name)
    return written


def headline(inputs: Inputs) -> str:
    """The fastest method, how much faster, whether it changed a token, and what it was chosen from."""
    best = best_row(inputs, ALL, inputs.temperatures[0])
    if best is None:
        return "No method was measured that decodes the target's own tokens beside vanilla."
    if best["speedup"] < 1.0:
        return (
            f"No method is faster than vanilla on this machine; the best, {best['method']}, decodes at "
            f"{interval(best, 'speedup')} of its speed."
        )
    counts = best["lossless"]
    if counts["compared"]:
        tokens = f"with all {counts['compared']} outputs equal to vanilla's"
        tokens += f" ({counts['near_ties']} up to near ties)" if counts["near_ties"] else ""
    else:
        tokens = "with sampled outputs"
    rows = len(candidates(inputs, ALL, best["temperature"]))
    chosen = (
        f" It is the fastest of {rows} rows, chosen on these same prompts: an upper estimate."
        if rows > 1
        else ""
    )
    return (
        f"{best['method']} decodes {interval(best, 'speedup')} as fast as vanilla over {best['prompts']} "
        f"prompts, at a mean acceptance length τ of {number(best['tau'])}, {tokens}.{chosen}"
    )


def facts(inputs: Inputs) -> dict[str, str]:
    """The few lines under the title; what is unknown is left out."""
    settings, machine = inputs.evaluation["settings"], inputs.evaluation["machine"]
    origin = settings["origin"]
    commit = str(origin.get("commit", ""))[:12]
    memory = machine.get("memory_gib")
    found = {
        "Target": inputs.target.get("source"),
        "Machine": machine.get("cpu"),
        "Cores": machine.get("usable_cores"),
        "Memory": f"{memory} GiB" if memory else None,
        "GPUs": ", ".join(machine.get("gpus") or []) or None,
        "Data type": settings["dtype"],
        "Prompts": inputs.results[0]["prompts"],
        "Tasks": ", ".join(task_name(task) for task in inputs.tasks),
        "Commit": f"{commit} (with local changes)" if commit and origin.get("dirty") else commit,
        "Measured": moment(settings["finished"]),
    }
    return {name: str(value) for name, value in found.items() if value}
