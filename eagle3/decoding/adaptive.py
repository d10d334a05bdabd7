"""A tree whose depth and size are chosen each round: expected tokens against the measured cost of a round.

A path's probability under the draft estimates how likely it is accepted, so a tree is expected to give 1 plus
the sum of its nodes' path probabilities. What a round costs is measured once on the machine at hand. The
round aims at the most expected tokens a second: where the draft is unsure it stays short, where it is sure it
goes deep. The choice depends on the draft's probabilities and the cost table alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.decoding.draft_tree import DraftTree, arrange, best
from eagle3.decoding.tree import DynamicGrowth, TreeShape

if TYPE_CHECKING:
    from eagle3.decoding.cache import KVCache
    from eagle3.models.draft import Draft
    from eagle3.models.target import Target

_CONTEXT = 128  # tokens in the cache while costs are measured
_REPEATS = 7


@dataclass(frozen=True)
class RoundCosts:
    """What a round is made of, in seconds.

    Args:
        verify: verify[n] is a forward of the target over n tokens; verify[0] is unused.
        draft_step: a forward of the draft over the nodes of one level.
        fixed: what every round takes beside: the draft's pass over the accepted tokens.
    """

    verify: tuple[float, ...]
    draft_step: float
    fixed: float

    def seconds(self, nodes: int, steps: int) -> float:
        """A round that verifies `nodes` tokens, the root included, after `steps` levels of drafting."""
        return self.fixed + (steps - 1) * self.draft_step + self.verify[nodes]


@dataclass(frozen=True)
class AdaptiveShape:
    """Trees up to `largest`; see the module."""

    largest: TreeShape
    costs: RoundCosts

    def __post_init__(self) -> None:
        assert len(self.costs.verify) > self.largest.num_draft_tokens, "no cost for the largest tree"

    @property
    def max_nodes(self) -> int:
        """See `Shape`."""
        return self.largest.max_nodes

    @property
    def max_expanded(self) -> int:
        """See `Shape`."""
        return self.largest.max_expanded

    @property
    def width(self) -> int:
        """See `Shape`."""
        return self.largest.width

    def grow(self, root: int) -> AdaptiveGrowth:
        """See `Shape`."""
        return AdaptiveGrowth(root, self)


class AdaptiveGrowth(DynamicGrowth):
    """EAGLE-2's growth, ended where another level, or another node, would not pay."""

    def __init__(self, root: int, shape: AdaptiveShape) -> None:
        super().__init__(root, shape.largest)
        self._costs = shape.costs
        self._conditional: list[list[float]] = []  # of every expanded node, its children's probabilities

    def extend(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[int]:
        self._conditional += [[math.exp(value) for value in row] for row in log_probs]
        frontier = super().extend(tokens, log_probs)
        if frontier and not self._another_level_pays(frontier):
            self.frontier = []
        return self.frontier

    def finish(self) -> DraftTree:
        nodes = best_size(self._probabilities(), self._costs, self.level, self.shape.num_draft_tokens)[0]
        return arrange(self.tokens, self.parents, best(self.scores, range(1, len(self.tokens)), nodes - 1))

    def _probabilities(self) -> list[float]:
        return [math.exp(score) for score in self.scores[1:]]

    def _another_level_pays(self, frontier: Sequence[int]) -> bool:
        """Whether a further level, with children as likely as this round's were so far, raises the rate."""
        limit = self.shape.num_draft_tokens
        known = self._probabilities()
        typical = [statistics.fmean(rank) for rank in zip(*self._conditional, strict=True)]
        guessed = [math.exp(self.scores[node]) * share for node in frontier for share in typical]
        stop = best_size(known, self._costs, self.level, limit)[1]
        go_on = best_size([*known, *guessed], self._costs, self.level + 1, limit)[1]
        return go_on > stop


def best_size(probabilities: Sequence[float], costs: RoundCosts, steps: int, limit: int) -> tuple[int, float]:
    """How many of the likeliest nodes to verify, the root included, and the expected tokens a second."""
    expected, choice = 1.0, (1, 0.0)
    for nodes, probability in enumerate(sorted(probabilities, reverse=True)[: limit - 1], start=2):
        expected += probability
        rate = expected / costs.seconds(nodes, steps)
        if rate > choice[1]:
            choice = (nodes, rate)
    return choice


@torch.inference_mode()
def measure_costs(target: Target, draft: Draft, largest: TreeShape) -> RoundCosts:
    """Time the parts of a round on this machine: medians over a short context, verification made monotone."""
    context = torch.zeros(1, _CONTEXT, dtype=torch.int64, device=target.device)
    places = torch.arange(_CONTEXT, device=target.device)[None]
    cache = target.new_cache(_CONTEXT + largest.num_draft_tokens)
    output = target.forward(context, places, cache, logits="none")
    own = draft.new_cache(_CONTEXT + largest.max_expanded + 2)
    states = draft.fuse(output)
    draft.forward(context, states, places, own, logits="none")

    def forward_target(count: int) -> None:
        target.forward(context[:, :count], _at(places, count), cache)

    def forward_draft(count: int, logits: str) -> None:
        draft.forward(context[:, :count], states[:, :count], _at(places, count), own, logits=logits)

    verify = [0.0]
    for nodes in range(1, largest.num_draft_tokens + 1):
        seconds = _median(partial(forward_target, nodes), cache, target.device)
        verify.append(max(seconds, verify[-1]))
    return RoundCosts(
        tuple(verify),
        _median(partial(forward_draft, largest.topk, "all"), own, target.device),
        _median(partial(forward_draft, 2, "last"), own, target.device),
    )


def _at(places: Tensor, count: int) -> Tensor:
    return places[:, :count] + _CONTEXT


def _median(run: Callable[[], None], cache: KVCache, device: torch.device) -> float:
    """Median seconds of `run`, whose additions to the cache are taken back."""
    seconds = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        cache.truncate(_CONTEXT)
    return statistics.median(seconds)
