"""A tree whose depth and size are chosen each round: expected tokens against the measured cost of a round.

A path's probability under the draft estimates how likely it is accepted, so a tree is expected to give 1 plus
the sum of its nodes' path probabilities. What a round costs is measured once on the machine at hand. The
round aims at the most expected tokens a second: where the draft is unsure it stays short, where it is sure it
goes deep. The choice depends on the draft's probabilities and the cost table alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3.decoding.draft_tree import DraftTree, arrange, best
from eagle3.decoding.tree import DynamicGrowth, TreeShape
from eagle3.decoding.vanilla import clock

if TYPE_CHECKING:
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

    @classmethod
    def from_milliseconds(cls, values: Mapping[str, Any]) -> RoundCosts:
        """The inverse of `as_milliseconds`."""
        verify = (0.0, *(value / 1e3 for value in values["verify"]))
        return cls(verify, values["draft_step"] / 1e3, values["fixed"] / 1e3)

    def as_milliseconds(self) -> dict[str, Any]:
        """For a file; "verify" begins with one token."""
        return {
            "verify": [round(1e3 * seconds, 3) for seconds in self.verify[1:]],
            "draft_step": round(1e3 * self.draft_step, 3),
            "fixed": round(1e3 * self.fixed, 3),
        }

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
    """Time the parts of a round on this machine, sizes in turn; more tokens never cost less in the result."""
    context = min(_CONTEXT, target.config.max_position_embeddings - largest.num_draft_tokens)
    level = max(largest.topk, 2)  # tokens of one draft step, and of the pass over accepted ones
    ids = torch.zeros(1, max(context, largest.num_draft_tokens, level), dtype=torch.int64)
    ids = ids.to(target.device)
    cache, own = target.new_cache(context + largest.num_draft_tokens), draft.new_cache(context + level)
    output = target.forward(ids[:, :context], _places(0, context, target), cache, logits="none")
    states = draft.fuse(output)
    draft.forward(ids[:, :context], states, _places(0, context, target), own, logits="none")
    states = states[:, :1].expand(-1, level, -1)

    def verify(count: int) -> None:
        target.forward(ids[:, :count], _places(context, count, target), cache)
        cache.truncate(context)

    def step(count: int, logits: str) -> None:
        places = _places(context, count, target)
        draft.forward(ids[:, :count], states[:, :count], places, own, logits=logits)
        own.truncate(context)

    parts: list[Callable[[], None]] = [
        *(partial(verify, nodes) for nodes in range(1, largest.num_draft_tokens + 1)),
        partial(step, largest.topk, "all"),
        partial(step, 2, "last"),
    ]
    seconds = _medians(parts, target.device)
    return RoundCosts((0.0, *_rising(seconds[:-2])), seconds[-2], seconds[-1])


def _places(first: int, count: int, target: Target) -> Tensor:
    return torch.arange(first, first + count, device=target.device)[None]


def _medians(parts: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Median seconds of each part, the parts in turn so that a slow moment falls on all of them."""
    now = clock(device)
    seconds: list[list[float]] = [[] for _ in parts]
    for repeat in range(_REPEATS + 1):  # the first is not counted
        for index, run in enumerate(parts):
            began = now()
            run()
            ended = now()
            if repeat:
                seconds[index].append(ended - began)
    return [statistics.median(values) for values in seconds]


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, length
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, many), (low, few) = pools[-2:]
            pools[-2:] = [((high * many + low * few) / (many + few), many + few)]
    return [mean for mean, length in pools for _ in range(length)]
