"""The shape of a draft tree and its growth, level by level: dynamic (EAGLE-2, EAGLE-3) or fixed (EAGLE-1).

A node's score is the log-probability of the path to it under the draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from eagle3.decoding.draft_tree import DraftTree, arrange, best


class Shape(Protocol):
    """How the tree of each round is grown, and the most it can take."""

    @property
    def max_nodes(self) -> int:
        """Most nodes the target verifies in one round, root included."""

    @property
    def max_expanded(self) -> int:
        """Most nodes the draft runs a forward over in one round, root excluded."""

    @property
    def width(self) -> int:
        """Children the draft names for each node it expands; a growth may take fewer."""

    def grow(self, root: int) -> Growth:
        """Start the tree of one round."""


@dataclass(frozen=True)
class TreeShape:
    """A dynamic draft tree (EAGLE-2, arXiv 2406.16858), with SGLang's parameter names and constraints.

    Each of `num_steps` levels expands the `topk` best nodes of the level before into `topk` children each; at
    the end the best `num_draft_tokens - 1` of all nodes are kept with the root. `topk = 1` is a chain. A node
    whose path has a probability below `confidence` under the draft is neither expanded nor kept.

    Raises:
        ValueError: if no such tree exists.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    confidence: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence = {self.confidence}: must be at least 0 and below 1")
        for name, low in (("num_steps", 1), ("topk", 1), ("num_draft_tokens", 2)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {low}")
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens = {self.num_draft_tokens}: with topk = 1 the tree is a chain, so it must "
                f"be num_steps + 1 = {self.num_steps + 1}"
            )
        most = self.topk + (self.num_steps - 1) * self.topk**2
        if self.num_draft_tokens - 1 > most:
            raise ValueError(
                f"num_draft_tokens = {self.num_draft_tokens}: a tree of num_steps = {self.num_steps} and "
                f"topk = {self.topk} has at most {most} nodes and the root; use at most {most + 1}"
            )

    @classmethod
    def chain(cls, num_steps: int) -> TreeShape:
        """A chain of `num_steps` drafted tokens."""
        return cls(num_steps, 1, num_steps + 1)

    def as_dict(self) -> dict[str, int]:
        """The parameters that SGLang has, by its names."""
        return {key: getattr(self, key) for key in ("num_steps", "topk", "num_draft_tokens")}

    @property
    def max_nodes(self) -> int:
        """See `Shape`."""
        return self.num_draft_tokens

    @property
    def max_expanded(self) -> int:
        """See `Shape`."""
        return (self.num_steps - 1) * self.topk

    @property
    def width(self) -> int:
        """See `Shape`."""
        return self.topk

    def grow(self, root: int) -> DynamicGrowth:
        """See `Shape`."""
        return DynamicGrowth(root, self)


@dataclass(frozen=True)
class StaticTree:
    """A tree of one fixed form (EAGLE-1). Path (0, 2): the third-best child of the root's best child."""

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
        """See `Shape`."""
        return len(self.paths) + 1

    @property
    def max_expanded(self) -> int:
        """See `Shape`."""
        return len({path[:-1] for path in self.paths}) - 1

    @property
    def width(self) -> int:
        """See `Shape`."""
        return max(path[-1] for path in self.paths) + 1

    def grow(self, root: int) -> StaticGrowth:
        """See `Shape`."""
        return StaticGrowth(root, self)


# `mc_sim_7b_63` of EAGLE-1's released code (SafeAILab/EAGLE, model/choices.py): 25 nodes, depth 5.
EAGLE_TREE = StaticTree(
    (
        *((0,), (1,), (2,), (3,)),
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
        *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
        *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
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
        self._least = math.log(shape.confidence) if shape.confidence else -math.inf

    def extend(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[int]:
        first = len(self.tokens)
        for parent, row, row_log_probs in zip(self.frontier, tokens, log_probs, strict=True):
            self._add(parent, row, row_log_probs)
        self.level += 1
        self.frontier = []
        if self.level < self.shape.num_steps:
            self.frontier = self._best(range(first, len(self.tokens)), self.shape.topk)
        return self.frontier

    def finish(self) -> DraftTree:
        # Nodes are numbered level by level, so equal scores prefer the shallow one and every kept node's
        # parent, which scores at least as much, is kept too.
        kept = self._best(range(1, len(self.tokens)), self.shape.num_draft_tokens - 1)
        return arrange(self.tokens, self.parents, kept)

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        """The `count` best of those that are likely enough."""
        return best(self.scores, [node for node in nodes if self.scores[node] >= self._least], count)


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


def check_width(shape: Shape, draft_vocabulary: int) -> None:
    """Refuse a tree that a draft cannot grow.

    Raises:
        ValueError: if a node needs more children than the draft vocabulary has tokens.
    """
    if shape.width > draft_vocabulary:
        raise ValueError(
            f"topk = {shape.width}: the draft vocabulary has only {draft_vocabulary} tokens; lower topk"
        )
