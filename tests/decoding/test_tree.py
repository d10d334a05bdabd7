"""Draft trees: connected, ranked by path probability, with masks that show ancestors and nothing else."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.decoding.draft_tree import DraftTree, arrange, best
from eagle3.decoding.tree import EAGLE_TREE, Growth, StaticTree, TreeShape

VOCAB = 12


def random_shape(data: st.DataObject) -> TreeShape:
    steps, topk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    most = topk + (steps - 1) * topk**2
    return TreeShape(steps, topk, steps + 1 if topk == 1 else data.draw(st.integers(2, most + 1)))


def grow(growth: Growth, width: int, seed: int, levels: Sequence[float] = ()) -> DraftTree:
    """Grow with random children; log-probabilities from `levels` (to force ties) or uniform."""
    rng = random.Random(seed)
    frontier = growth.frontier
    while frontier:
        rows = [rng.sample(range(VOCAB), width) for _ in frontier]
        scores = [
            sorted((rng.choice(levels) if levels else math.log(rng.random()) for _ in row), reverse=True)
            for row in rows
        ]
        frontier = growth.extend(rows, scores)
    return growth.finish()


@given(st.data(), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_dynamic_tree_keeps_the_best_nodes_and_is_connected(data: st.DataObject, seed: int) -> None:
    shape = random_shape(data)
    growth = shape.grow(7)
    tree = grow(growth, shape.topk, seed, data.draw(st.sampled_from([(), (-1.0, 0.0), (1e-7, -0.5)])))
    assert len(tree.tokens) == shape.num_draft_tokens
    assert tree.tokens[0] == 7
    assert max(tree.depths) <= shape.num_steps

    # Brute force over all the nodes grown: the paths of the best num_draft_tokens - 1 by (score, depth, age).
    def path_of(node: int) -> tuple[int, ...]:
        path: list[int] = []
        while node > 0:
            path.append(growth.tokens[node])
            node = growth.parents[node]
        return tuple(path[::-1])

    order = sorted(
        range(1, len(growth.tokens)), key=lambda node: (-growth.scores[node], len(path_of(node)), node)
    )
    expected = {path_of(node) for node in order[: shape.num_draft_tokens - 1]}
    got = {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree.tokens))}
    assert got == expected
    assert all(path[:-1] in expected for path in expected if len(path) > 1)


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_each_level_expands_the_best_nodes_of_the_level_before(seed: int) -> None:
    shape = TreeShape(num_steps=3, topk=3, num_draft_tokens=10)
    growth = shape.grow(0)
    rng = random.Random(seed)
    first = 1
    while growth.frontier:
        rows = [rng.sample(range(VOCAB), 3) for _ in growth.frontier]
        growth.extend(rows, [sorted((math.log(rng.random()) for _ in row), reverse=True) for row in rows])
        level = range(first, len(growth.tokens))
        first = len(growth.tokens)
        if growth.frontier:
            worst = min(growth.scores[node] for node in growth.frontier)
            others = set(level) - set(growth.frontier)
            assert len(growth.frontier) == 3
            assert all(growth.scores[node] <= worst for node in others)
    assert len(growth.tokens) == 1 + 3 + 9 + 9


@pytest.mark.parametrize("confidence", [0.05, 0.2, 0.999])
@pytest.mark.parametrize("seed", range(5))
def test_unlikely_paths_are_neither_expanded_nor_kept(seed: int, confidence: float) -> None:
    growth = TreeShape(3, 3, 13, confidence).grow(0)
    tree = grow(growth, 3, seed, (-0.3, -1.2, -2.0))
    likely = {node for node, score in enumerate(growth.scores) if math.exp(score) >= confidence}
    assert {growth.parents[node] for node in range(1, len(growth.tokens))} <= likely
    assert len(tree.tokens) == min(13, len(likely))
    assert (len(tree.tokens) == 1) == (confidence == 0.999)


def test_scores_multiply_along_the_path() -> None:
    growth = TreeShape(2, 2, 4).grow(0)
    growth.extend([[5, 6]], [[math.log(0.6), math.log(0.3)]])
    growth.extend([[1, 2], [3, 4]], [[math.log(0.5), math.log(0.4)], [math.log(0.9), math.log(0.1)]])
    # 5: .6, 6: .3, 5-1: .30, 5-2: .24, 6-3: .27, 6-4: .03. The tie of 6 and 5-1 goes to the shallow node,
    # whichever of the two rounds to more, since 3 nodes are kept.
    tree = growth.finish()
    paths = {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, 4)}
    assert paths == {(5,), (6,), (5, 1)}


def test_certain_child_rounded_above_one_stays_below_its_parent() -> None:
    growth = TreeShape(2, 2, 3).grow(0)
    growth.extend([[5, 6]], [[-0.1, -3.0]])
    growth.extend([[1, 2], [3, 4]], [[1e-6, -20.0], [-1.0, -2.0]])
    assert growth.finish().tokens == (0, 5, 1)


def test_likeliest_path_comes_first() -> None:
    growth = TreeShape(2, 2, 6).grow(0)
    growth.extend([[5, 6]], [[-0.5, -1.0]])
    growth.extend([[1, 2], [3, 4]], [[-0.1, -3.0], [-0.2, -0.3]])
    tree = growth.finish()
    assert tree.tokens[:3] == (0, 5, 1)


@given(st.lists(st.integers(0, 100), min_size=0, max_size=14))
@settings(max_examples=200, deadline=None)
def test_mask_depths_and_paths_of_any_tree(choices: list[int]) -> None:
    parents = (-1, *(choice % (i + 1) for i, choice in enumerate(choices)))
    tree = DraftTree(tuple(range(len(parents))), parents)
    mask = tree.mask()
    shown = torch.tril(torch.ones(len(parents), len(parents))).bool() if mask is None else mask
    for node in range(len(parents)):
        path = tree.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(parents[child] == parent for parent, child in itertools.pairwise(path))
        assert tree.depths[node] == len(path) - 1
        assert shown[node].nonzero().flatten().tolist() == sorted(path)
        assert tree.children[parents[node]][node] == node if node else True


def test_chain_needs_no_mask() -> None:
    tree = DraftTree.chain([4, 5, 6])
    assert tree.is_chain
    assert tree.mask() is None
    assert tree.path(2) == [0, 1, 2]
    assert TreeShape.chain(3) == TreeShape(3, 1, 4)


def test_arrange_numbers_depth_first() -> None:
    tree = arrange([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2], kept=[2, 1, 4, 3])
    assert tree.tokens == (9, 2, 4, 1, 3)
    assert tree.parents == (-1, 0, 1, 0, 3)


def test_best_prefers_low_numbers_on_ties() -> None:
    assert best([0.0, -1.0, -1.0, -0.5], [1, 2, 3], 2) == [3, 1]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, 2), "num_steps = 0"),
        ((3, 0, 2), "topk = 0"),
        ((3, 2, 1), "num_draft_tokens = 1"),
        ((3, 1, 3), r"num_steps \+ 1 = 4"),
        ((2, 3, 14), "use at most 13"),
    ],
)
def test_impossible_trees_are_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape(*shape)


def test_largest_possible_tree_is_accepted() -> None:
    shape = TreeShape(2, 3, 13)
    assert len(grow(shape.grow(0), 3, seed=1).tokens) == 13


def test_eagle_static_tree_is_the_released_one() -> None:
    tree = grow(EAGLE_TREE.grow(0), EAGLE_TREE.width, seed=3)
    assert EAGLE_TREE.max_nodes == len(tree.tokens) == 26
    assert [tree.depths.count(depth) for depth in range(6)] == [1, 4, 8, 8, 3, 2]
    assert EAGLE_TREE.max_expanded == 4 + 4 + 1 + 1
    ranks = set(EAGLE_TREE.paths)
    assert (0, 0, 0, 0, 1) in ranks
    assert (3, 0) in ranks
    assert (3, 1) not in ranks


def test_static_tree_keeps_its_form_whatever_the_scores() -> None:
    static = StaticTree(((0,), (1,), (1, 0)))
    growth = static.grow(0)
    growth.extend([[5, 6]], [[-0.01, -50.0]])
    assert growth.frontier == [2]
    growth.extend([[7, 8]], [[-50.0, -60.0]])
    tree = growth.finish()
    paths = {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, 4)}
    assert paths == {(5,), (6,), (6, 7)}


@pytest.mark.parametrize("paths", [((0, 0),), ((1,),), ((0,), (0,)), ()])
def test_broken_static_trees_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="static tree"):
        StaticTree(paths)
