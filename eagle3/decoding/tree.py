"""Draft trees: their growth level by level, their final form, masks and paths. Plain Python, no model.

Node 0 is the root: the last token that the target has chosen but not yet processed. Every other node is a
drafted token. Scores are log-probabilities of the whole path under the draft.
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
        assert len(self.tokens) == len(self.parents) >= 1 and self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)
        if self.draft_probabilities is not None:
            assert self.is_chain and len(self.draft_probabilities) == len(self.tokens) - 1

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


@dataclass(frozen=True)
class TreeShape:
    """A dynamic draft tree (EAGLE-2, arXiv 2406.16858), with SGLang's parameter names and constraints.

    Each of `num_steps` levels expands the `topk` best nodes of the level before into `topk` children each; at
    the end the best `num_draft_tokens - 1` of all nodes are kept with the root. `topk = 1` is a chain.

    Raises:
        ValueError: if no such tree exists.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        for name, low in (("num_steps", 1), ("topk", 1), ("num_draft_tokens", 2)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {low}")
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens = {self.num_draft_tokens}: with topk = 1 the tree is a chain, so it must be "
                f"num_steps + 1 = {self.num_steps + 1}"
            )
        most = self.topk + (self.num_steps - 1) * self.topk**2
        if self.num_draft_tokens - 1 > most:
            raise ValueError(
                f"num_draft_tokens = {self.num_draft_tokens}: a tree of num_steps = {self.num_steps} and topk = "
                f"{self.topk} has at most {most} nodes and the root; use at most {most + 1}"
            )

    @classmethod
    def chain(cls, num_steps: int) -> TreeShape:
        """A chain of `num_steps` drafted tokens."""
        return cls(num_steps, 1, num_steps + 1)

    @property
    def max_nodes(self) -> int:
        """Nodes the target verifies, root included."""
        return self.num_draft_tokens

    @property
    def max_expanded(self) -> int:
        """Nodes the draft runs a forward over in one round, root excluded."""
        return (self.num_steps - 1) * self.topk

    @property
    def width(self) -> int:
        """The largest number of children that one node gets."""
        return self.topk

    def grow(self, root: int) -> DynamicGrowth:
        """Start the tree of one round."""
        return DynamicGrowth(root, self)


@dataclass(frozen=True)
class StaticTree:
    """A tree of one fixed form (EAGLE-1). A path (0, 2) is the third-best child of the best child of the root."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = set(self.paths)
        for path in self.paths:
            if not path or (len(path) > 1 and path[:-1] not in known):
                raise ValueError(f"static tree: the parent of path {path} is missing; add it")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(f"static tree: path {path} skips a better sibling; add it")
        if len(known) != len(self.paths) or not known:
            raise ValueError("static tree: paths must be distinct and at least one")

    @property
    def max_nodes(self) -> int:
        """Nodes the target verifies, root included."""
        return len(self.paths) + 1

    @property
    def max_expanded(self) -> int:
        """Nodes the draft runs a forward over in one round, root excluded."""
        return len({path[:-1] for path in self.paths}) - 1

    @property
    def width(self) -> int:
        """The largest number of children that one node gets."""
        return max(path[-1] for path in self.paths) + 1

    def grow(self, root: int) -> StaticGrowth:
        """Start the tree of one round."""
        return StaticGrowth(root, self)


# `mc_sim_7b_63` of EAGLE-1's released code (SafeAILab/EAGLE, model/choices.py): 25 nodes, depth 5.
EAGLE_TREE = StaticTree(
    tuple(
        tuple(int(rank) for rank in path)
        for path in (
            "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
        ).split()
    )
)


class Growth:
    """A tree being drafted. `frontier` holds the nodes whose children the draft predicts next."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.scores = [0.0]
        self.frontier = [0]

    def extend(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[int]:
        """Add a level: row i holds the children of `frontier[i]`, most likely first.

        Returns:
            The new frontier, also kept in `frontier`; empty when the tree is complete.
        """
        raise NotImplementedError

    def finish(self) -> DraftTree:
        """The tree to verify."""
        raise NotImplementedError

    def _add(self, parent: int, tokens: Sequence[int], log_probs: Sequence[float]) -> range:
        first = len(self.tokens)
        score = self.scores[parent]
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            # A log-probability rounded to above 0 would rank a child before its parent.
            self.scores.append(score + min(log_prob, 0.0))
        return range(first, len(self.tokens))


class DynamicGrowth(Growth):
    """EAGLE-2's growth: expand the best nodes of each level, keep the best of all."""

    def __init__(self, root: int, shape: TreeShape) -> None:
        super().__init__(root)
        self.shape = shape
        self.level = 0

    def extend(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[int]:
        first = len(self.tokens)
        for parent, row, row_log_probs in zip(self.frontier, tokens, log_probs, strict=True):
            self._add(parent, row, row_log_probs)
        self.level += 1
        self.frontier = []
        if self.level < self.shape.num_steps:
            self.frontier = best(self.scores, range(first, len(self.tokens)), self.shape.topk)
        return self.frontier

    def finish(self) -> DraftTree:
        # Nodes are numbered level by level, so equal scores prefer the shallow one and every kept node's
        # parent, which scores at least as much, is kept too.
        kept = best(self.scores, range(1, len(self.tokens)), self.shape.num_draft_tokens - 1)
        return arrange(self.tokens, self.parents, kept)


class StaticGrowth(Growth):
    """EAGLE-1's growth: the ranks of the children decide, whatever their scores."""

    def __init__(self, root: int, tree: StaticTree) -> None:
        super().__init__(root)
        self.counts = child_counts(tree)
        self.paths: list[tuple[int, ...]] = [()]

    def extend(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[int]:
        frontier = []
        for parent, row, row_log_probs in zip(self.frontier, tokens, log_probs, strict=True):
            count = self.counts[self.paths[parent]]
            for rank, node in enumerate(self._add(parent, row[:count], row_log_probs[:count])):
                self.paths.append((*self.paths[parent], rank))
                if self.paths[node] in self.counts:
                    frontier.append(node)
        self.frontier = frontier
        return frontier

    def finish(self) -> DraftTree:
        return arrange(self.tokens, self.parents, range(1, len(self.tokens)))


@lru_cache(maxsize=16)
def child_counts(tree: StaticTree) -> dict[tuple[int, ...], int]:
    """For each path that has children (the root's is ()), how many."""
    counts: dict[tuple[int, ...], int] = {}
    for path in tree.paths:
        counts[path[:-1]] = counts.get(path[:-1], 0) + 1
    return counts


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
