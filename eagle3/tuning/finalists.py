"""The second measurement: the best trials against the defaults on prompts that no trial saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from eagle3.measure.statistics import Interval
from eagle3.measure.summary import paired_speedup
from eagle3.tuning.measurement import Measurement
from eagle3.tuning.space import Configuration, Space

Ranking = Sequence[tuple[Configuration, Measurement]]


@dataclass(frozen=True)
class Finalist:
    """A configuration of the second measurement; `tuned` is False for the defaults."""

    name: str
    configuration: Configuration
    tuned: bool


@dataclass(frozen=True)
class Outcome:
    """What the second measurement decided. `over_default` is the winner's speedup over the best default.

    `winner` and `over_default` are None where every configuration changed a token; `over_default` is None as
    well where the winner is itself a default, or no default is left.
    """

    rows: list[dict[str, Any]]
    winner: Finalist | None
    best_default: Finalist | None
    over_default: Interval | None
    summary: str
    reservations: tuple[str, ...] = ()  # what the verdict on the measurement warns of

    def row(self, finalist: Finalist) -> dict[str, Any]:
        """The held-out row of a finalist."""
        return next(row for row in self.rows if row["name"] == finalist.name)

    @property
    def beats_default(self) -> bool:
        """Whether the tuned winner is faster than every default beyond noise."""
        low = self.over_default.low if self.over_default is not None else None
        return low is not None and low > 1.0


def choose_finalists(
    ranking: Ranking, defaults: Mapping[str, Configuration], space: Space, count: int
) -> list[Finalist]:
    """The defaults, by what they are known as, and the `count` best configurations that are none."""
    names: dict[Configuration, str] = {}
    for name, configuration in defaults.items():
        names[configuration] = f"{names[configuration]}, {name}" if configuration in names else name
    chosen = [
        Finalist(f"{space.label(configuration)} ({name})", configuration, False)
        for configuration, name in names.items()
    ]
    tuned = [configuration for configuration, _ in ranking if configuration not in names][:count]
    return [*chosen, *(Finalist(space.label(item), item, True) for item in tuned)]


def fastest_default(ranking: Ranking, defaults: Mapping[str, Configuration]) -> dict[str, Configuration]:
    """The default that was fastest in the trials, by all names it has; the first where none was measured."""
    measured = [configuration for configuration, _ in ranking if configuration in defaults.values()]
    chosen = measured[:1] or list(defaults.values())[:1]
    return {name: configuration for name, configuration in defaults.items() if configuration in chosen}


def decide(
    finalists: Sequence[Finalist],
    results: Sequence[Mapping[str, Any]],
    per_prompt: pd.DataFrame,
    seed: int,
) -> Outcome:
    """Rank the finalists by held-out speedup; the fastest that changes no token wins.

    Args:
        finalists: what was measured, by name.
        results: rows of the evaluation over all tasks (`measure.summary.results_table`).
        per_prompt: its table of single prompts, for the paired comparison of winner and default.
        seed: of the bootstrap.
    """
    by_name = {row["method"]: row for row in results}
    rows = [_row(finalist, by_name[finalist.name]) for finalist in finalists]
    rows.sort(key=lambda row: -row["speedup"])
    sound = {row["name"] for row in rows if not row["lossless_failures"]}
    order = {row["name"]: place for place, row in enumerate(rows)}
    ordered = sorted((item for item in finalists if item.name in sound), key=lambda item: order[item.name])
    winner = ordered[0] if ordered else None
    best_default = next((item for item in ordered if not item.tuned), None)
    over = None
    if winner is not None and winner.tuned and best_default is not None:
        over = paired_speedup(per_prompt, best_default.name, winner.name, seed)
    outcome = Outcome(rows, winner, best_default, over, "")
    return Outcome(rows, winner, best_default, over, _summary(outcome))


def _row(finalist: Finalist, result: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("speedup", "speedup_low", "speedup_high", "tau", "tokens_per_second", "prompts")
    return {
        "name": finalist.name,
        "tuned": finalist.tuned,
        **{key: result[key] for key in keys},
        "lossless_failures": result["lossless"]["failures"],
        "params": finalist.configuration.as_dict(),
    }


def _summary(outcome: Outcome) -> str:
    winner, default, over = outcome.winner, outcome.best_default, outcome.over_default
    if winner is None:
        return (
            "Every configuration changed a token: there is no winner. See the losslessness of the evaluation."
        )
    slow = ""
    if outcome.row(winner)["speedup"] <= 1.0:
        slow = " It is no faster than vanilla: do not draft on this machine."
    if not winner.tuned:
        return f"Nothing beats the defaults: {winner.name} is the fastest on held-out prompts.{slow}"
    if default is None or over is None:
        return f"{winner.name} is the fastest on held-out prompts; no default was measured beside it.{slow}"
    bounds = f"{over.estimate:.3f}x"
    if over.low is not None and over.high is not None:
        bounds += f" [{over.low:.3f}, {over.high:.3f}]"
    if outcome.beats_default:
        return f"{winner.name} beats the best default, {default.name}, on held-out prompts: {bounds}.{slow}"
    return (
        f"Nothing beats the best default, {default.name}, beyond noise: {winner.name} is at {bounds} of its "
        f"speed on held-out prompts.{slow}"
    )
