"""Optimizers and schedule: every parameter once, updates of the promised size, a curve with known ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from eagle3.models.target import Target
from eagle3.training.optimizer import Muon, learning_rate, make_optimizers, orthogonalise, set_learning_rate
from tests.models.drafts import random_eagle3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer(tiny_target: Target, kind: str) -> None:
    module = random_eagle3(tiny_target)
    optimizers = make_optimizers(module, kind, 1e-3, (0.9, 0.95), 0.0)
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, module.parameters()))


def test_muon_takes_the_inner_matrices_alone(tiny_target: Target) -> None:
    module = random_eagle3(tiny_target)
    adamw, muon = make_optimizers(module, "muon", 1e-3, (0.9, 0.95), 0.0)
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, Muon)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    inner = {names[id(parameter)] for group in muon.param_groups for parameter in group["params"]}
    assert "lm_head.weight" not in inner
    assert not any("norm" in name for name in inner)
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.mlp.down_proj.weight"} <= inner


@pytest.mark.parametrize("shape", [(12, 12), (8, 40), (40, 8)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    result = orthogonalise(matrix)
    values = torch.linalg.svdvals(result)
    assert result.shape == matrix.shape
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.6
    # The singular vectors stay: the result is near the polar factor.
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    polar = left @ right
    cosine = (result * polar).sum() / (result.norm() * polar.norm())
    assert float(cosine) > 0.95


def test_muon_steps_have_the_size_of_adamw_steps() -> None:
    """Root mean square 0.2 lr, so that one learning rate serves both."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(64, 96))
    optimizer = Muon([parameter], lr=0.01)
    parameter.grad = torch.randn(64, 96) * 1e3
    optimizer.step()
    rms = float(parameter.detach().square().mean().sqrt())
    assert rms == pytest.approx(0.2 * 0.01, rel=0.3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizers_lower_a_loss(kind: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4))
    x = torch.randn(64, 8)
    goal = x @ torch.randn(8, 4)
    optimizers = make_optimizers(module, kind, 0.02, (0.9, 0.95), 0.0)

    def loss() -> torch.Tensor:
        return (module(x) - goal).square().mean()

    first = float(loss().detach())
    for _ in range(150):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert float(loss().detach()) < 0.1 * first


def test_learning_rate_warms_up_linearly_and_falls_to_a_twentieth() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.05 + 0.95 / 2)
    assert rates[99] == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_learning_rate_of_very_short_trainings_is_positive(steps: int) -> None:
    for share in (0.0, 0.05, 0.9):
        assert all(0 < learning_rate(step, steps, 1.0, share) <= 1 for step in range(steps))


def test_set_learning_rate_reaches_every_group(tiny_target: Target) -> None:
    optimizers = make_optimizers(random_eagle3(tiny_target), "muon", 1e-3, (0.9, 0.95), 0.0)
    set_learning_rate(optimizers, 0.5)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.5}
