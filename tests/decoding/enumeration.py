"""Exact enumeration of everything a randomised procedure can do, with the probability of each outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from eagle3.decoding.sampling import Randomness

Outcome = TypeVar("Outcome", bound=Hashable)


class Script(Randomness):
    """Randomness that follows a prescribed list of decisions and records the alternatives at each."""

    def __init__(self, decisions: list[int]) -> None:
        super().__init__(0)
        self.decisions = decisions
        self.taken = 0
        self.probability = 1.0
        self.pending: list[list[int]] = []

    def accept(self, probability: float) -> bool:
        assert -1e-9 <= probability <= 1 + 1e-9
        return bool(self._choose([1 - probability, probability]))

    def draw(self, weights: Tensor) -> int:
        assert float(weights.min()) >= 0
        return self._choose((weights.double() / weights.double().sum()).tolist())

    def _choose(self, probabilities: list[float]) -> int:
        if self.taken == len(self.decisions):
            possible = [i for i, p in enumerate(probabilities) if p > 0]
            self.pending += [[*self.decisions, other] for other in possible[1:]]
            self.decisions = [*self.decisions, possible[0]]
        decision = self.decisions[self.taken]
        self.taken += 1
        self.probability *= probabilities[decision]
        return decision


def enumerate_outcomes(run: Callable[[Randomness], Outcome]) -> dict[Outcome, float]:
    """Run `run` along every possible sequence of random decisions; the probability of each outcome."""
    outcomes: dict[Outcome, float] = defaultdict(float)
    todo: list[list[int]] = [[]]
    while todo:
        script = Script(todo.pop())
        outcome = run(script)
        outcomes[outcome] += script.probability
        todo += script.pending
    assert abs(sum(outcomes.values()) - 1) < 1e-5
    return dict(outcomes)
