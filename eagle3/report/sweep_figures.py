"""Figures of a sweep: its trials, what each parameter does and decides, and the cost model's errors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from eagle3.report.style import COLOURS, NEUTRAL, WIDTH, styled, subplots, write_png
from eagle3.report.sweep import finished_trials, sweep_figure

TREE_PARAMETERS = ("num_steps", "topk", "num_draft_tokens")
# Fewer trials say nothing about importance.
_IMPORTANCE_FROM = 8

Trial = Mapping[str, Any]


CAPTIONS = {
    "trials": "The sweep's trials: speedup in order, and speedup against τ with the Pareto front.",
    "slices": "Speedup by each parameter; hollow: trials that were stopped early.",
    "options": "Speedup by each option that varied; hollow: trials that were stopped early.",
    "contour": "Speedup, as colour, over levels and branching, and over levels and token budget.",
    "importance": "How much each parameter decides (PED-ANOVA).",
    "cost_model": "Speedups predicted by models that were not shown the configuration, and measured.",
}


def write_figures(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results (see `results.sweep_results`) allow; returns the files written."""
    with styled():
        drawn = draw_figures(results)
        for name, canvas in drawn.items():
            write_png(canvas, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in drawn]


def draw_figures(results: Mapping[str, Any]) -> dict[str, Canvas]:
    """The figures that the results allow, by the names of CAPTIONS."""
    trials = estimated_trials(results)
    drawn: dict[str, Canvas] = {}
    if finished_trials(results):
        drawn["trials"] = sweep_figure(results)
    if trials:
        drawn["slices"] = slices_figure(trials, TREE_PARAMETERS)
        if options := varied_options(trials):
            drawn["options"] = slices_figure(trials, options)
        drawn["contour"] = contour_figure(trials)
    if importances := parameter_importances(trials):
        drawn["importance"] = importance_figure(importances)
    if results.get("cost_model") and results["cost_model"]["errors"]:
        drawn["cost_model"] = cost_model_figure(results["cost_model"])
    return drawn


def estimated_trials(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trials that measured something, with their "estimate": the speedup, or what it was when stopped."""
    measured = [trial for trial in results["trials"] if trial["state"] in ("complete", "pruned")]
    keys = {"complete": "speedup", "pruned": "partial_speedup"}
    estimated = [(trial, trial.get(keys[trial["state"]])) for trial in measured]
    return [{**trial, "estimate": float(value)} for trial, value in estimated if value is not None]


def varied_options(trials: Sequence[Trial]) -> tuple[str, ...]:
    """What else than the tree differs between the trials, as drafts, dtypes or threads."""
    names = [name for name in trials[0]["params"] if name not in TREE_PARAMETERS]
    return tuple(name for name in names if len({trial["params"][name] for trial in trials}) > 1)


def slices_figure(trials: Sequence[Trial], names: Sequence[str]) -> Canvas:
    """Speedup by each of the parameters; trials that were stopped are hollow."""
    canvas, axes = subplots(1, len(names), WIDTH, 3.0)
    kinds = {"complete": ("measured in full", COLOURS[0]), "pruned": ("stopped early", "none")}
    for axis, name in zip(axes, names, strict=True):
        tree = name in TREE_PARAMETERS
        # An option's values are names, in an order that does not depend on which was stopped.
        values = sorted({str(trial["params"][name]) for trial in trials})
        places = {value: place for place, value in enumerate(values)}
        for state, (label, fill) in kinds.items():
            chosen = [trial for trial in trials if trial["state"] == state]
            axis.plot(
                [trial["params"][name] if tree else places[str(trial["params"][name])] for trial in chosen],
                [trial["estimate"] for trial in chosen],
                "o",
                color=COLOURS[0],
                markerfacecolor=fill,
                markersize=4,
                label=label,
            )
        if tree:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set_xticks(range(len(values)), values)
            axis.set_xlim(-0.5, len(values) - 0.5)
        axis.axhline(1.0, color=NEUTRAL, linewidth=1.2, linestyle="--")
        axis.set_xlabel(name)
    axes[0].set_ylabel("decode speedup")
    axes[0].legend()
    return canvas


def contour_figure(trials: Sequence[Trial]) -> Canvas:
    """Speedup, as colour, over levels and branching, and over levels and token budget."""
    canvas, axes = subplots(1, 2, WIDTH, 3.3)
    speedups = [trial["estimate"] for trial in trials]
    for axis, name in zip(axes, TREE_PARAMETERS[1:], strict=True):
        points = axis.scatter(
            [trial["params"]["num_steps"] for trial in trials],
            [trial["params"][name] for trial in trials],
            c=speedups,
            cmap="viridis",
            s=36,
        )
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
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
    """Optuna's PED-ANOVA over tree and options; empty where too few trials or values say anything."""
    if len(trials) < _IMPORTANCE_FROM:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    distributions: dict[str, optuna.distributions.BaseDistribution] = {}
    for name in TREE_PARAMETERS:
        values = sorted({trial["params"][name] for trial in trials})
        if len(values) > 1:
            distributions[name] = optuna.distributions.IntDistribution(values[0], values[-1])
    for name in varied_options(trials):
        choices = list(dict.fromkeys(trial["params"][name] for trial in trials))
        distributions[name] = optuna.distributions.CategoricalDistribution(choices)
    for trial in trials:
        params = {name: trial["params"][name] for name in distributions}
        study.add_trial(
            optuna.create_trial(value=trial["estimate"], params=params, distributions=distributions)
        )
    if not distributions or len({trial["estimate"] for trial in trials}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
