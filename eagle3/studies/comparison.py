"""A study's drafts decoded side by side: one evaluation like any other, its rows named by variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3 import paths
from eagle3.config import Settings
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.measure.bench import Bench, evaluated_target
from eagle3.measure.prompts import task_prompts
from eagle3.measure.settings import EvaluationSettings
from eagle3.provenance import describe_run, fingerprint_machine, hash_tree
from eagle3.studies.variants import Variant


def compare(
    settings: Settings,
    variants: Sequence[Variant],
    trained: Mapping[str, Mapping[str, Any]],
    folder: Path,
    device: str,
    command: str,
) -> dict[str, Any]:
    """Measure every variant with the study's tree; the rows of the result have the training's facts beside.

    Args:
        trained: what `train_variants` returned.
        folder: of the variants' folders; the journal that a killed run resumes from is kept there too.
    """
    wanted, measured = settings.studies.evaluate, settings.evaluate
    target, tree = evaluated_target(measured, device), wanted.tree
    bench = Bench(target, folder, getattr(torch, measured.draft_dtype))
    decoders = [bench.vanilla()]
    for variant in variants:
        drafter = EagleDrafter(bench.head(f"{variant.name}/draft"), tree.shape)
        decoders.append(SpeculativeDecoder(target, drafter, variant.name))
    report = bench.evaluate(
        decoders,
        task_prompts(paths.TASKS, wanted.tasks, "held_out", wanted.prompts_per_task),
        EvaluationSettings(
            max_new_tokens=wanted.max_new_tokens,
            dtype=measured.dtype,
            repeats=wanted.repeats,
            seed=settings.seed,
        ),
        machine=fingerprint_machine(),
        subject={
            "target": hash_tree(paths.TARGET),
            "drafts": {variant.name: hash_tree(folder / variant.name / "draft") for variant in variants},
            "draft_dtype": measured.draft_dtype,
            "threads": torch.get_num_threads(),
            "device": str(target.device),
        },
        reports=folder,
        journal=folder / "evaluation.jsonl",
        origin=describe_run(paths.REPORTS.resolve().parent, command),
        trees={variant.name: tree.model_dump() for variant in variants},
    )
    by_name = {variant.name: variant for variant in variants}
    rows = []
    for row in report["results"]:
        found = by_name.get(row["method"])
        if found is not None:  # vanilla and its A/A arm stay in the verdict
            rows.append({**row, "method": found.method, **trained[found.name]})
    return {**report, "results": rows}
