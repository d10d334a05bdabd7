"""The attention pattern of training-time test against a loop that says it in words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle3.training.attention import rotate
from eagle3.training.attention import test_time_attention as attend


def case(
    steps: int, length: int = 6, heads: int = 4, kv_heads: int = 2
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A query and, for each step, keys and values."""
    torch.manual_seed(0)
    query = torch.randn(2, heads, length, 8, dtype=torch.float64)
    keys = [torch.randn(2, kv_heads, length, 8, dtype=torch.float64) for _ in range(steps)]
    values = [torch.randn(2, kv_heads, length, 8, dtype=torch.float64) for _ in range(steps)]
    return query, keys, values


def loop(query: Tensor, keys: list[Tensor], values: list[Tensor], shift: int = 0) -> Tensor:
    """Each query sees step 0 at 0..t - shift, and every later step at t alone."""
    batch, heads, length, dim = query.shape
    group = heads // keys[0].shape[1]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                seen = [(0, j) for j in range(t + 1 - shift)] + [(step, t) for step in range(1, len(keys))]
                scores = [query[b, h, t] @ keys[step][b, h // group, j] / math.sqrt(dim) for step, j in seen]
                weights = torch.stack(scores).softmax(0)
                out[b, h, t] = sum(
                    weight * values[step][b, h // group, j]
                    for weight, (step, j) in zip(weights, seen, strict=True)
                )
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_equals_the_loop(steps: int, heads: int, kv_heads: int) -> None:
    query, keys, values = case(steps, heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(attend(query, keys, values, None), loop(query, keys, values))


@pytest.mark.parametrize("steps", [2, 4])
def test_at_chosen_positions_it_is_what_it_is_among_all(steps: int) -> None:
    query, keys, values = case(steps)
    chosen = torch.tensor([[0, 3, 5], [1, 2, 4]])

    def at_chosen(x: Tensor) -> Tensor:
        return torch.stack([part[:, at] for part, at in zip(x, chosen, strict=True)])

    alone = attend(
        at_chosen(query),
        [keys[0], *map(at_chosen, keys[1:])],
        [values[0], *map(at_chosen, values[1:])],
        chosen,
    )
    torch.testing.assert_close(alone, at_chosen(attend(query, keys, values, None)))


@pytest.mark.parametrize("steps", [2, 4])
def test_a_mask_that_hides_real_context_would_be_noticed(steps: int) -> None:
    query, keys, values = case(steps)
    shifted = loop(query, keys, values, shift=1)
    assert (attend(query, keys, values, None) - shifted).abs().max() > 0.1


def test_gradients_reach_every_step_and_only_what_is_seen() -> None:
    query, keys, values = case(3)
    for tensor in (*keys, *values):
        tensor.requires_grad_()
    attend(query, keys, values, None)[:, :, 3].sum().backward()
    for tensor in (keys[0], values[0]):
        assert tensor.grad is not None
        assert (tensor.grad[:, :, :4].abs().amax(dim=(0, 1, 3)) > 0).all()
        assert not tensor.grad[:, :, 4:].any()
    for tensor in (*keys[1:], *values[1:]):
        assert tensor.grad is not None
        assert (tensor.grad[:, :, 3].abs().amax(dim=(0, 1, 2)) > 0).all()
        assert not tensor.grad[:, :, [0, 1, 2, 4, 5]].any()


def test_gradients_are_those_of_the_loop() -> None:
    query, keys, values = case(3, length=4)
    inputs = [query, *keys, *values]
    for tensor in inputs:
        tensor.requires_grad_()
    weights = torch.randn_like(query)
    mine = torch.autograd.grad((attend(query, keys, values, None) * weights).sum(), inputs)
    theirs = torch.autograd.grad((loop(query, keys, values) * weights).sum(), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_rotation_depends_on_the_distance_alone() -> None:
    """Scores of rotated queries and keys are those of any other pair of positions as far apart."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03]).double().repeat(2)

    def score(i: int, j: int) -> Tensor:
        turned = [
            rotate(x, (position * frequencies).cos()[None], (position * frequencies).sin()[None])
            for x, position in ((query, i), (key, j))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(14, 10))
    assert abs(float(score(7, 3) - score(7, 4))) > 1e-3
