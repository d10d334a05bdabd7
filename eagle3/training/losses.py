"""Losses over the draft vocabulary, with the target's distribution as the goal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """sum_m weights[m] * CE(goal[m], softmax(logits[m])), keeping one [M, Vd] tensor, not three of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, goal: Tensor, weights: Tensor) -> Tensor:
        normaliser = logits.logsumexp(-1)  # [M]
        losses = normaliser - torch.linalg.vecdot(goal, logits)
        ctx.save_for_backward((logits - normaliser[:, None]).exp_(), goal, weights)
        return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        predicted, goal, weights = ctx.saved_tensors
        return (predicted - goal) * (weights * gradients[0])[:, None], None, None


def soft_cross_entropy(logits: Tensor, goal: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of cross-entropies against the target's distribution (EAGLE-3, arXiv 2503.01840).

    Args:
        logits: of the draft, [M, Vd].
        goal: the target's distribution restricted to the draft vocabulary and renormalised, [M, Vd].
        weights: [M].
    """
    loss: Tensor = _SoftCrossEntropy.apply(logits, goal, weights)
    return loss


def lk_loss(logits: Tensor, goal: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of -log(sum_v min(p_v, q_v)), the acceptance probability's log (arXiv 2602.23881).

    Shapes as in `soft_cross_entropy`.
    """
    overlap = torch.minimum(logits.softmax(-1), goal).sum(-1)
    return -(overlap.clamp_min(1e-6).log() * weights).sum()


LOSSES = {"soft_ce": soft_cross_entropy, "lk": lk_loss}
