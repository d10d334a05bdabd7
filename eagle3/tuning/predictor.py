"""Predicted speedups: a cost model for each combination of options that was measured."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eagle3.tuning.cost_model import CostModel, Costs
from eagle3.tuning.measurement import Measurement
from eagle3.tuning.space import Configuration, Options

Known = Mapping[Configuration, Measurement]


@dataclass(frozen=True)
class Predictor:
    """Drafts, dtypes, threads and backends have costs and acceptance of their own, and a model each.

    There is no model for a combination with too few measurements, nor for trees that end by the draft's
    confidence: their sizes are not known beforehand.
    """

    models: Mapping[Options, CostModel]

    @classmethod
    def fit(cls, known: Known) -> "Predictor":
        """Fit a model to each combination of options that has enough measurements."""
        fitted = {options: CostModel.fit(group) for options, group in by_options(known).items()}
        return cls({options: model for options, model in fitted.items() if model is not None})

    def model_of(self, configuration: Configuration) -> CostModel | None:
        """The model that predicts this configuration, if any."""
        return self.models.get(configuration.options) if configuration.drafted_whole else None

    def speedup(self, configuration: Configuration) -> float | None:
        """Predicted decode speedup over vanilla; None without a model."""
        model = self.model_of(configuration)
        return None if model is None else model.speedup(configuration)

    def ranked(self, configurations: Iterable[Configuration]) -> list[tuple[Configuration, CostModel]]:
        """Those that can be predicted, each with its model, the fastest first."""
        found = [(item, model) for item in configurations if (model := self.model_of(item)) is not None]
        return sorted(found, key=lambda pair: -pair[1].speedup(pair[0]))

    def with_costs(self, costs: Costs) -> "Predictor":
        """The same drafts on another machine."""
        return Predictor({options: model.with_costs(costs) for options, model in self.models.items()})


def by_options(known: Known) -> dict[Options, dict[Configuration, Measurement]]:
    """What is known of trees that are drafted whole, by the options beside the tree."""
    groups: dict[Options, dict[Configuration, Measurement]] = defaultdict(dict)
    for configuration, item in known.items():
        if configuration.drafted_whole:
            groups[configuration.options][configuration] = item
    return dict(groups)


def unseen_speedups(known: Known) -> dict[Configuration, float]:
    """The speedup of each measured configuration as predicted by a model that was not shown it."""
    predicted = {}
    for group in by_options(known).values():
        for configuration in group:
            model = CostModel.fit({other: item for other, item in group.items() if other != configuration})
            if model is not None:
                predicted[configuration] = model.speedup(configuration)
    return predicted
