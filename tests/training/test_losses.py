"""Losses against their plain definitions, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.training.losses import LOSSES, lk_loss, soft_cross_entropy


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(7, 11, dtype=dtype) * 3).requires_grad_()
    goal = (torch.randn(7, 11, dtype=dtype) * 3).softmax(-1)
    weights = torch.rand(7, dtype=dtype)
    weights[2] = 0
    return logits, goal, weights


def test_soft_cross_entropy_equals_torch_with_gradients() -> None:
    logits, goal, weights = case()
    loss = soft_cross_entropy(logits, goal, weights)
    (gradient,) = torch.autograd.grad(loss * 3, logits)
    reference = (F.cross_entropy(logits, goal, reduction="none") * weights).sum()
    (expected,) = torch.autograd.grad(reference * 3, logits)
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(gradient, expected)
    assert not gradient[2].any()


def test_soft_cross_entropy_passes_the_numerical_gradient_check() -> None:
    logits, goal, weights = case()
    assert torch.autograd.gradcheck(lambda x: soft_cross_entropy(x, goal, weights), logits)


def test_soft_cross_entropy_of_large_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = soft_cross_entropy(logits, torch.tensor([[0.5, 0.5, 0.0]]), torch.ones(1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1e4)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_soft_cross_entropy_is_least_at_the_goal() -> None:
    """There it is the goal's entropy, and the gradient vanishes."""
    _, goal, weights = case()
    logits = goal.log().requires_grad_()
    loss = soft_cross_entropy(logits, goal, weights)
    entropy = -(goal * goal.log()).sum(-1)
    torch.testing.assert_close(loss, (entropy * weights).sum())
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_lk_loss_is_the_log_of_the_acceptance_probability() -> None:
    """Worked: p = (0.5, 0.5) against q = (0.8, 0.2) accepts with 0.5 + 0.2 = 0.7."""
    logits = torch.tensor([[0.8, 0.2]]).log()
    goal = torch.tensor([[0.5, 0.5]])
    assert float(lk_loss(logits, goal, torch.tensor([2.0]))) == pytest.approx(-2 * math.log(0.7))


def test_lk_loss_gradients_are_those_of_the_definition() -> None:
    logits, goal, weights = case()
    probabilities = logits.softmax(-1)
    acceptance = torch.where(probabilities < goal, probabilities, goal).sum(-1)
    reference = -(acceptance.log() * weights).sum()
    (expected,) = torch.autograd.grad(reference, logits)
    (gradient,) = torch.autograd.grad(lk_loss(logits, goal, weights), logits)
    torch.testing.assert_close(gradient, expected)


def test_lk_loss_without_overlap_is_finite() -> None:
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = lk_loss(logits, torch.tensor([[0.0, 1.0]]), torch.ones(1))
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_supervised_is_a_zero_loss_with_zero_gradients(name: str) -> None:
    logits = torch.zeros(0, 11, requires_grad=True)
    loss = LOSSES[name](logits, torch.zeros(0, 11), torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0
    assert logits.grad is not None


@pytest.mark.parametrize("name", LOSSES)
def test_training_on_a_loss_reaches_its_goal(name: str) -> None:
    logits, goal, _ = case()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(600):
        optimizer.zero_grad()
        LOSSES[name](logits, goal, torch.ones(7, dtype=torch.float64)).backward()
        optimizer.step()
    overlap = torch.minimum(logits.softmax(-1), goal).sum(-1)
    assert float(overlap.detach().min()) > 0.97
