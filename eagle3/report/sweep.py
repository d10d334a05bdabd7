"""A sweep's trials, its Pareto front, and its winner on held-out prompts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas

from eagle3.report.blocks import Table, cells
from eagle3.report.formats import MARKS_NOTE, MISSING, interval, number, speedup_cell, tree_text
from eagle3.report.style import COLOURS, NEUTRAL, WIDTH, subplots


def finished_trials(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Trials that have a speedup, in order of their number."""
    trials: Iterable[Mapping[str, Any]] = sweep.get("trials", [])
    found = [trial for trial in trials if trial.get("speedup") is not None]
    return sorted(found, key=lambda trial: int(trial.get("number", 0)))


def pareto_front(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Trials that no other beats in both τ and speedup, by rising τ."""
    usable = [trial for trial in trials if trial.get("tau") is not None]
    front: list[Mapping[str, Any]] = []
    for trial in sorted(usable, key=lambda trial: (-trial["tau"], -trial["speedup"])):
        if not front or trial["speedup"] > front[-1]["speedup"]:
            front.append(trial)
    return front[::-1]


def sweep_figure(sweep: Mapping[str, Any]) -> Canvas:
    """Speedup by trial with the best so far, and speedup against τ with the Pareto front."""
    trials = finished_trials(sweep)
    canvas, (history, cloud) = subplots(1, 2, WIDTH, 3.3)
    speedups = [trial["speedup"] for trial in trials]
    best = [max(speedups[: index + 1]) for index in range(len(speedups))]
    history.plot(range(len(speedups)), speedups, "o", color=COLOURS[0], markersize=4)
    history.plot(range(len(best)), best, "-", color=COLOURS[1], drawstyle="steps-post", label="best so far")
    history.set_title("Trials in order", loc="left")
    history.set_xlabel("trial")
    history.set_ylabel("decode speedup")
    history.legend()
    usable = [trial for trial in trials if trial.get("tau") is not None]
    cloud.plot(
        [t["tau"] for t in usable], [t["speedup"] for t in usable], "o", color=COLOURS[0], markersize=4
    )
    front = pareto_front(trials)
    cloud.plot(
        [t["tau"] for t in front], [t["speedup"] for t in front], "o-", color=COLOURS[1], label="Pareto front"
    )
    cloud.set_title("Speedup against τ", loc="left")
    cloud.set_xlabel("τ")
    cloud.legend()
    for axis in (history, cloud):
        axis.axhline(1.0, color=NEUTRAL, linewidth=1.2, linestyle="--")
    return canvas


def sweep_states_table(sweep: Mapping[str, Any]) -> Table:
    """How the trials ended: what was pruned or failed is part of the result."""
    states = [str(trial.get("state", "unknown")).lower() for trial in sweep.get("trials", [])]
    return Table(
        caption="Trials by state",
        columns=("State", "Trials"),
        rows=tuple(cells([state, str(states.count(state))]) for state in dict.fromkeys(states)),
    )


def best_trials_table(sweep: Mapping[str, Any], count: int = 10) -> Table:
    """The best trials on the tuning split."""
    trials = sorted(finished_trials(sweep), key=lambda trial: -float(trial["speedup"]))[:count]
    return Table(
        caption=f"The best {len(trials)} trials (tuning split: biased upward, see the held-out table)",
        columns=("Trial", "Tree", "Decode speedup (95 % interval)", "τ"),
        rows=tuple(
            cells(
                [
                    str(trial.get("number", MISSING)),
                    tree_text(trial.get("params") or trial.get("tree")),
                    interval(trial, "speedup"),
                    number(trial.get("tau")),
                ]
            )
            for trial in trials
        ),
    )


def held_out_table(sweep: Mapping[str, Any]) -> Table:
    """The finalists and the defaults, measured again on prompts that no trial saw."""
    return Table(
        caption="Measured again on held-out prompts (the best of these rows is chosen on them, too)",
        columns=("Configuration", "Tuned", "Decode speedup (95 % interval)", "τ"),
        rows=tuple(
            cells(
                [
                    row["name"],
                    "tuned" if row["tuned"] else "default",
                    speedup_cell({"method": row["name"], **row}),
                    number(row.get("tau")),
                ]
            )
            for row in sweep["held_out"]
        ),
        note=MARKS_NOTE,
        text_columns=frozenset({"Tuned"}),
    )
