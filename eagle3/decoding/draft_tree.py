"""Draft trees as the target verifies them: nodes, masks, paths. Plain Python, no model.

Node 0 is the root: the last token that the target has chosen but not yet processed. Every other node is a
drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """What the target verifies in one forward.

    A node's parent comes before it. `draft_probabilities[i]` is the distribution [V] that node i + 1 of a
    sampled chain was drawn from; None when the drafted tokens were chosen deterministically.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # of the root: -1
    draft_probabilities: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) >= 1
        assert self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)
        if self.draft_probabilities is not None:
            assert self.is_chain
            assert len(self.draft_probabilities) == len(self.tokens) - 1

    @classmethod
    def chain(cls, tokens: Sequence[int], draft_probabilities: Sequence[Tensor] | None = None) -> DraftTree:
        """A root and one path below it."""
        probabilities = None if draft_probabilities is None else tuple(draft_probabilities)
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), probabilities)

    @property
    def is_chain(self) -> bool:
        """Whether the nodes form one path, so that an ordinary causal mask fits."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node; the root has 0."""
        return depths_of(self.parents)

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each node, token -> child node."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]][self.tokens[node]] = node
        return children

    def mask(self) -> Tensor | None:
        """Which node sees which: itself and its ancestors. Bool [N, N], or None for a chain (causal)."""
        return None if self.is_chain else ancestor_mask(self.parents)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


def best(scores: Sequence[float], nodes: Sequence[int], count: int) -> list[int]:
    """The `count` nodes with the highest scores, best first; of equal scores the lower-numbered node."""
    return sorted(nodes, key=lambda node: -scores[node])[:count]


def arrange(tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> DraftTree:
    """The tree of the root and the `kept` nodes (best first), numbered depth-first.

    Depth-first with the best child first puts the likeliest path at nodes 0, 1, 2, ...: when it is the one
    accepted, its cache slots already lie in place.
    """
    children: dict[int, list[int]] = {0: []}
    for node in kept:
        children[node] = []
    for node in kept:
        children[parents[node]].append(node)
    new_tokens: list[int] = []
    new_parents: list[int] = []
    stack = [(0, -1)]
    while stack:
        node, parent = stack.pop()
        number = len(new_tokens)
        new_tokens.append(tokens[node])
        new_parents.append(parent)
        stack.extend((child, number) for child in reversed(children[node]))
    return DraftTree(tuple(new_tokens), tuple(new_parents))


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree whose parents come before their children."""
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


@lru_cache(maxsize=64)  # a static tree has the same mask every round
def ancestor_mask(parents: tuple[int, ...]) -> Tensor:
    """Bool [N, N]: row i is True at i and at the ancestors of i. Shared, so not to be written to."""
    mask = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return torch.from_numpy(mask)


def slot_mask(visible: Sequence[Sequence[int]], slots: int) -> Tensor:
    """Bool [T, slots]: row i is True at the slots `visible[i]`."""
    mask = np.zeros((len(visible), slots), dtype=bool)
    for row, shown in zip(mask, visible, strict=True):
        row[list(shown)] = True
    return torch.from_numpy(mask)
