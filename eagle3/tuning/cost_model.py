"""What a configuration would give: the cost of verifying and drafting, and acceptance by depth, fitted.

    speedup = vanilla seconds per token * tau / (draft + verify + other seconds of a round)

    verify(n)      = a + b n                        n tokens, root included
    draft(s, k)    = c + (s - 1) (d + e k)          s levels of k nodes; the first level needs no forward
    other(n)       = f + g n                        acceptance, cache, engine
    tau(s, k, n)   = 1 + sum over depth d < s of the product of acceptances at depth 0..d
    acceptance(d)  = 1 - (1 - alpha_d) w**-beta     w = nodes a level = min(k, (n - 1) / s); 1 for a chain

alpha_d is a chain's acceptance at depth d given that all before were accepted. It and beta maximise the
likelihood of the counts that the trials saw; the costs are non-negative least squares of relative errors. The
limit on a level's width stands for the order in which a dynamic tree spends its budget.

A server tells no parts of a round. Then a + c + f is one cost that belongs to no part, and it, b, d and e are
fitted to whole rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import expit

from eagle3.tuning.measurement import Measurement
from eagle3.tuning.space import Configuration

# Depths with an acceptance of their own; deeper ones share the last.
_DEPTHS = 5
# Configurations that a fit needs: as many as the largest part, or a whole round, has costs.
_FEWEST, _FEWEST_WHOLE = 3, 4


@dataclass(frozen=True)
class Acceptance:
    """A chain's conditional acceptance by depth, and how much of the rest a wider level catches."""

    by_depth: tuple[float, ...]
    width_exponent: float

    def at(self, depth: int, width: float) -> float:
        """Chance that some node at `depth` continues the accepted path, for levels of `width` nodes."""
        alpha = self.by_depth[min(depth, len(self.by_depth) - 1)]
        return 1.0 - (1.0 - alpha) * float(width) ** -self.width_exponent

    def tau(self, configuration: Configuration) -> float:
        """Mean acceptance length, the bonus token included."""
        width, tau, reach = level_width(configuration), 1.0, 1.0
        for depth in range(configuration.num_steps):
            reach *= self.at(depth, width)
            tau += reach
        return tau


@dataclass(frozen=True)
class Costs:
    """Seconds of one round's parts. Each pair or triple as in the module's formulas.

    `by_part` False: fitted to whole rounds, so that what is fixed stands under `other`.
    """

    vanilla_token: float
    verify: tuple[float, float]
    draft: tuple[float, float, float]
    other: tuple[float, float]
    by_part: bool = True

    def round_seconds(self, configuration: Configuration) -> float:
        """Drafting, verifying and the rest."""
        values = (
            np.dot(_verify_features(configuration), self.verify),
            np.dot(_draft_features(configuration), self.draft),
            np.dot(_verify_features(configuration), self.other),
        )
        return float(sum(values))

    @classmethod
    def flat(cls, target_seconds: float, draft_seconds: float) -> "Costs":
        """A machine where a target forward and a draft step cost the same for any number of tokens.

        So it is on a GPU while the weights' transfer, and not arithmetic, takes the time.
        """
        return cls(target_seconds, (target_seconds, 0.0), (draft_seconds, draft_seconds, 0.0), (0.0, 0.0))


@dataclass(frozen=True)
class CostModel:
    """Predicts the speedup of trees that are drafted whole, with the draft and options it was fitted to."""

    acceptance: Acceptance
    costs: Costs

    @classmethod
    def fit(cls, known: Mapping[Configuration, Measurement]) -> "CostModel | None":
        """Fit to measured trees that are drafted whole, of one draft with one set of options.

        None where fewer than three of them have rounds, or four where a server tells no parts of a round.
        """
        pairs = [(configuration, item) for configuration, item in known.items() if item.rounds.rounds]
        by_part = any(item.rounds.verify_seconds for _, item in pairs)
        if len(pairs) < (_FEWEST if by_part else _FEWEST_WHOLE):
            return None
        vanilla = np.average(
            [item.vanilla_seconds_per_token for _, item in pairs],
            weights=[len(item.prompts) for _, item in pairs],
        )
        make = _costs_of_parts if by_part else _costs_of_whole_rounds
        return cls(fit_acceptance(known), make(float(vanilla), pairs))

    def with_costs(self, costs: Costs) -> "CostModel":
        """The same draft on another machine."""
        return CostModel(self.acceptance, costs)

    def speedup(self, configuration: Configuration) -> float:
        """Predicted decode speedup over vanilla."""
        tau = self.acceptance.tau(configuration)
        return self.costs.vanilla_token * tau / self.costs.round_seconds(configuration)


def level_width(configuration: Configuration) -> float:
    """Nodes of a mean level, at most topk."""
    return min(configuration.topk, (configuration.num_draft_tokens - 1) / configuration.num_steps)


def fit_acceptance(known: Mapping[Configuration, Measurement]) -> Acceptance:
    """Maximum likelihood of the (reached, accepted) counts by depth, slightly drawn to one half."""
    rows = [
        (min(depth, _DEPTHS - 1), level_width(configuration), reached, accepted)
        for configuration, item in known.items()
        for depth, (reached, accepted) in enumerate(
            zip(item.rounds.reached, _padded(item.rounds.accepted, len(item.rounds.reached)), strict=True)
        )
        if reached
    ]
    table = np.array(rows, dtype=np.float64)
    depth, width = table[:, 0].astype(int), table[:, 1]
    reached, accepted = table[:, 2], table[:, 3]

    def loss(values: NDArray[np.float64]) -> float:
        rejected = np.clip((1.0 - expit(values[depth])) * width ** -values[-1], 1e-9, 1.0 - 1e-9)
        likelihood = accepted * np.log1p(-rejected) + (reached - accepted) * np.log(rejected)
        return float(-likelihood.sum() + 0.05 * (values[:-1] ** 2).sum())

    start = np.array([0.0] * _DEPTHS + [0.3])
    bounds = [(-8.0, 8.0)] * _DEPTHS + [(0.0, 3.0)]
    found = optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds)
    return Acceptance(tuple(float(value) for value in expit(found.x[:-1])), float(found.x[-1]))


def _costs_of_parts(vanilla_token: float, pairs: Sequence[tuple[Configuration, Measurement]]) -> Costs:
    """Each part's own times, fitted."""
    parts = [item.round_ms() for _, item in pairs]
    verify = np.array([_verify_features(configuration) for configuration, _ in pairs])
    draft = np.array([_draft_features(configuration) for configuration, _ in pairs])
    rest = [part["accept"] + part["cache"] + part["other"] for part in parts]
    return Costs(
        vanilla_token,
        _pair(_fit_costs(verify, [part["verify"] for part in parts])),
        _triple(_fit_costs(draft, [part["draft"] for part in parts])),
        _pair(_fit_costs(verify, rest)),
    )


def _costs_of_whole_rounds(vanilla_token: float, pairs: Sequence[tuple[Configuration, Measurement]]) -> Costs:
    """All parts together: a fixed cost, one of each verified token, and those of draft steps and nodes."""
    features = np.array(
        [
            (*_verify_features(configuration), *_draft_features(configuration)[1:])
            for configuration, _ in pairs
        ]
    )
    whole = [sum(item.round_ms().values()) for _, item in pairs]
    fixed, token, step, node = _fit_costs(features, whole)
    return Costs(vanilla_token, (0.0, token), (0.0, step, node), (fixed, 0.0), by_part=False)


def _verify_features(configuration: Configuration) -> tuple[float, float]:
    return 1.0, float(configuration.num_draft_tokens)


def _draft_features(configuration: Configuration) -> tuple[float, float, float]:
    forwards = configuration.num_steps - 1
    return 1.0, float(forwards), float(forwards * configuration.topk)


def _fit_costs(features: NDArray[np.float64], milliseconds: list[float]) -> list[float]:
    """Non-negative coefficients in seconds; every row counts by its relative error."""
    seconds = np.maximum(np.array(milliseconds) / 1000, 1e-9)
    solution, _ = optimize.nnls(features / seconds[:, None], np.ones(len(seconds)))
    return [float(value) for value in solution]


def _padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (values + (0,) * length)[:length]


def _pair(values: list[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _triple(values: list[float]) -> tuple[float, float, float]:
    first, second, third = values
    return first, second, third
