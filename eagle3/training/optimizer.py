"""Optimizers: AdamW, or Muon for inner matrices with AdamW for head and norms; one schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

    For matrices only. The update has the root mean square of AdamW's (a factor 0.2 sqrt(max(rows, columns)),
    arXiv 2502.16982), so that both optimizers share one learning rate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(momentum, group["momentum"]))
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The nearest matrix with singular values of about one, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def make_optimizers(
    module: nn.Module, kind: str, lr: float, betas: tuple[float, float], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """The optimizers that together train every parameter of the module."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        inner = parameter.dim() == 2 and not name.startswith("lm_head")
        (matrices if kind == "muon" and inner else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay)
    ]
    if matrices:
        optimizers.append(Muon(matrices, lr=lr))
    return optimizers


def learning_rate(step: int, steps: int, lr: float, warmup_share: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = max(1, round(steps * warmup_share))
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for optimizer in optimizers:
        group: dict[str, Any]
        for group in optimizer.param_groups:
            group["lr"] = lr
