"""Figures of a sweep: its trials, what each parameter does and decides, and the cost model's errors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from matplotlib.figure import Figure as Canvas

from eagle3.report.style import COLOURS, NEUTRAL, WIDTH, styled, subplots, write_png
from eagle3.report.sweep import finished_trials, sweep_figure

TREE_PARAMETERS = ("num_steps", "topk", "num_draft_tokens")
# Fewer trials say nothing about importance.
_IMPORTANCE_FROM = 8

Trial = Mapping[str, Any]


def write_figures(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results (see `results.sweep_results`) allow; returns the files written."""
    trials = finished_trials(results)
    drawn: dict[str, Canvas] = {}
    with styled():
        if trials:
            drawn["trials"] = sweep_figure(results)
            drawn["slices"] = slices_figure(trials)
            drawn["contour"] = contour_figure(trials)
        if importances := parameter_importances(trials):
            drawn["importance"] = importance_figure(importances)
        if results["cost_model"] and results["cost_model"]["errors"]:
            drawn["cost_model"] = cost_model_figure(results["cost_model"])
        for name, canvas in drawn.items():
            write_png(canvas, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in drawn]


def slices_figure(trials: Sequence[Trial]) -> Canvas:
    """Speedup by each parameter of the tree."""
    canvas, axes = subplots(1, len(TREE_PARAMETERS), WIDTH, 3.0)
    for axis, name in zip(axes, TREE_PARAMETERS, strict=True):
        axis.plot(
            [trial["params"][name] for trial in trials],
            [trial["speedup"] for trial in trials],
            "o",
            color=COLOURS[0],
            markersize=4,
        )
        axis.axhline(1.0, color=NEUTRAL, linewidth=1.2, linestyle="--")
        axis.set_xlabel(name)
    axes[0].set_ylabel("decode speedup")
    return canvas


def contour_figure(trials: Sequence[Trial]) -> Canvas:
    """Speedup, as colour, over levels and branching, and over levels and token budget."""
    canvas, axes = subplots(1, 2, WIDTH, 3.3)
    speedups = [trial["speedup"] for trial in trials]
    for axis, name in zip(axes, TREE_PARAMETERS[1:], strict=True):
        points = axis.scatter(
            [trial["params"]["num_steps"] for trial in trials],
            [trial["params"][name] for trial in trials],
            c=speedups,
            cmap="viridis",
            s=36,
        )
        axis.set_xlabel("num_steps")
        axis.set_ylabel(name)
    canvas.colorbar(points, ax=axes, label="decode speedup")
    return canvas


def importance_figure(importances: Mapping[str, float]) -> Canvas:
    """How much each parameter decides."""
    canvas, (axis,) = subplots(1, 1, WIDTH, 0.9 + 0.4 * len(importances))
    names = list(importances)[::-1]
    axis.barh(names, [importances[name] for name in names], color=COLOURS[0])
    axis.set_xlabel("share of the differences between good and all trials")
    return canvas


def cost_model_figure(model: Mapping[str, Any]) -> Canvas:
    """Speedups predicted by models that were not shown the configuration, against those measured."""
    canvas, (axis,) = subplots(1, 1, WIDTH / 2, 3.6)
    measured = [item["measured"] for item in model["errors"]]
    predicted = [item["predicted"] for item in model["errors"]]
    span = [min(measured + predicted), max(measured + predicted)]
    axis.plot(span, span, "--", color=NEUTRAL, linewidth=1.2)
    axis.plot(measured, predicted, "o", color=COLOURS[0], markersize=4)
    axis.set_xlabel("measured decode speedup")
    axis.set_ylabel("predicted")
    error = model["median_relative_error"]
    axis.set_title(f"Median error {100 * error:.1f} %", loc="left")
    return canvas


def parameter_importances(trials: Sequence[Trial]) -> dict[str, float]:
    """Optuna's PED-ANOVA over the tree's parameters; empty where too few trials or values say anything."""
    if len(trials) < _IMPORTANCE_FROM:
        return {}
    study = optuna.create_study(direction="maximize")
    ranges = {name: sorted({trial["params"][name] for trial in trials}) for name in TREE_PARAMETERS}
    varied = [name for name in TREE_PARAMETERS if len(ranges[name]) > 1]
    for trial in trials:
        study.add_trial(
            optuna.create_trial(
                value=trial["speedup"],
                params={name: trial["params"][name] for name in varied},
                distributions={
                    name: optuna.distributions.IntDistribution(ranges[name][0], ranges[name][-1])
                    for name in varied
                },
            )
        )
    if not varied or len({trial["speedup"] for trial in trials}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
