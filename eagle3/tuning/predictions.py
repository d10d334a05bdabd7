"""What the cost models say of a study: of every feasible configuration, beside what was measured of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eagle3.tuning.cost_model import CostModel
from eagle3.tuning.measurement import Measurement
from eagle3.tuning.predictor import Predictor, unseen_speedups
from eagle3.tuning.space import Configuration, Options, Space

# How many predictions sweep.json shows; all of them are in a table of their own.
_SHOWN = 20


@dataclass(frozen=True)
class Predictions:
    """`unseen` has for measured configurations what a model that was not shown them predicts."""

    predictor: Predictor
    unseen: Mapping[Configuration, float]
    known: Mapping[Configuration, Measurement]

    @classmethod
    def of(cls, known: Mapping[Configuration, Measurement]) -> "Predictions":
        """From all that is known of a study's configurations."""
        return cls(Predictor.fit(known), unseen_speedups(known), known)

    def summary(self, space: Space) -> dict[str, Any] | None:
        """The models, their error, and their best predictions, JSON-ready; None without a model."""
        if not self.predictor.models:
            return None
        measured = {item: self.known[item].speedup() for item in self.unseen}
        relative = [abs(predicted / measured[item] - 1.0) for item, predicted in self.unseen.items()]
        return {
            "models": [model_row(options, model) for options, model in self.predictor.models.items()],
            "median_relative_error": float(np.median(relative)) if relative else None,
            "errors": [
                {"name": space.label(item), "predicted": predicted, "measured": measured[item]}
                for item, predicted in self.unseen.items()
            ],
            "predictions": best_predictions(self.predictor, space, _SHOWN),
        }

    def table(self, space: Space) -> pd.DataFrame:
        """One row a feasible configuration: its parameters, `predicted` speedup and `tau`, and what was
        `measured`, with the `relative_error` of a prediction that was `unseen`.

        Empty cells: not measured, or a combination of options with too few measurements for a model.
        """
        rows = []
        for configuration in space.configurations():
            model = self.predictor.model_of(configuration)
            item, unseen = self.known.get(configuration), self.unseen.get(configuration)
            measured = None if item is None else item.speedup()
            rows.append(
                {
                    **configuration.as_dict(),
                    "predicted": None if model is None else model.speedup(configuration),
                    "tau": None if model is None else model.acceptance.tau(configuration),
                    "measured": measured,
                    "unseen": unseen,
                    "relative_error": None if measured is None or unseen is None else unseen / measured - 1,
                }
            )
        return pd.DataFrame(rows)


def best_predictions(predictor: Predictor, space: Space, count: int) -> list[dict[str, Any]]:
    """The configurations that are predicted to be fastest."""
    return [
        {
            "name": space.label(item),
            "params": item.as_dict(),
            "speedup": model.speedup(item),
            "tau": model.acceptance.tau(item),
        }
        for item, model in predictor.ranked(space.configurations())[:count]
    ]


def model_row(options: Options, model: CostModel) -> dict[str, Any]:
    """One combination of options with its costs in milliseconds and its acceptance, JSON-ready."""
    costs = model.costs
    return {
        **options._asdict(),
        "fitted_to": "parts of rounds" if costs.by_part else "whole rounds",
        "acceptance_by_depth": list(model.acceptance.by_depth),
        "width_exponent": model.acceptance.width_exponent,
        "vanilla_ms_per_token": 1000 * costs.vanilla_token,
        "verify_ms": {"fixed": 1000 * costs.verify[0], "per_token": 1000 * costs.verify[1]},
        "draft_ms": {
            "fixed": 1000 * costs.draft[0],
            "per_step": 1000 * costs.draft[1],
            "per_node": 1000 * costs.draft[2],
        },
        "other_ms": {"fixed": 1000 * costs.other[0], "per_token": 1000 * costs.other[1]},
    }
