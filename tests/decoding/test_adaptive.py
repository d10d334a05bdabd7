"""Adaptive trees: the size is the one that brute force finds, and costs move it the way they should."""

from __future__ import annotations

import math
import random

import pytest

from eagle3.decoding.adaptive import AdaptiveGrowth, AdaptiveShape, RoundCosts, best_size, measure_costs
from eagle3.decoding.tree import TreeShape
from eagle3.models.target import Target
from tests.decoding.drafts import random_draft

LARGEST = TreeShape(4, 2, 12)


def linear_costs(per_node: float, draft_step: float = 0.05, fixed: float = 0.05) -> RoundCosts:
    """A vanilla step is 1."""
    return RoundCosts((0.0, *(1 + per_node * n for n in range(12))), draft_step, fixed)


@pytest.mark.parametrize("seed", range(20))
def test_size_is_the_best_of_all_sizes(seed: int) -> None:
    rng = random.Random(seed)
    probabilities = [rng.random() ** 3 for _ in range(rng.randint(1, 15))]
    costs = RoundCosts((0.0, *sorted(rng.uniform(1, 3) for _ in range(12))), rng.random(), rng.random())
    best = sorted(probabilities, reverse=True)
    rates = {
        nodes: (1 + sum(best[: nodes - 1])) / costs.seconds(nodes, 3)
        for nodes in range(2, min(12, len(best) + 1) + 1)
    }
    nodes, rate = best_size(probabilities, costs, 3, 12)
    assert rate == pytest.approx(max(rates.values()))
    assert rates[nodes] == pytest.approx(rate)


def grow(shape: AdaptiveShape, probability: float) -> AdaptiveGrowth:
    """A draft whose first choice always has this probability, its second a tenth of the rest."""
    growth = shape.grow(7)
    row = [math.log(probability), math.log((1 - probability) / 10)]
    while growth.frontier:
        growth.extend([[1, 2]] * len(growth.frontier), [row] * len(growth.frontier))
    return growth


def test_a_sure_draft_goes_deep_and_an_unsure_one_stops() -> None:
    shape = AdaptiveShape(LARGEST, linear_costs(0.03))
    sure, unsure = grow(shape, 0.95), grow(shape, 0.05)
    assert sure.level == 4
    assert unsure.level == 1
    assert len(sure.finish().tokens) > len(unsure.finish().tokens)


def test_dear_verification_makes_the_tree_smaller() -> None:
    sizes = [
        len(grow(AdaptiveShape(LARGEST, linear_costs(cost)), 0.7).finish().tokens)
        for cost in (0.001, 0.05, 0.3)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 12 > sizes[-1]


def test_dear_drafting_makes_the_tree_shallower() -> None:
    levels = [
        grow(AdaptiveShape(LARGEST, linear_costs(0.03, draft_step=cost)), 0.7).level
        for cost in (0.01, 0.3, 3.0)
    ]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] == 4 > levels[-1] == 1


def test_costs_are_measured_and_the_caches_left_as_they_were(tiny_target: Target) -> None:
    costs = measure_costs(tiny_target, random_draft(tiny_target), LARGEST)
    assert len(costs.verify) == 13
    assert list(costs.verify) == sorted(costs.verify), "more nodes never cost less"
    assert costs.verify[1] > 0
    assert costs.draft_step > 0
    assert costs.fixed > 0
