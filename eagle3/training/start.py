"""Where a draft's weights start: the target's own head and norm, and a linear draft solved by least squares.

A draft trained for minutes is far from converged, so its start decides much of what it reaches. The best
linear guess of the next state from what the draft reads costs seconds (normal equations over some thousand
tokens) and already proposes tokens; training then adds what is not linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.models.draft import DraftAttention
from eagle3.models.eagle import EagleLayer, EagleModule
from eagle3.models.eagle3 import Eagle3Module
from eagle3.models.target import Target
from eagle3.training.batches import Batch

# Relative to the mean diagonal of the normal equations.
_RIDGE = 1e-4
# Score of a token against itself at the start, so that a head attends nearly to its own position alone.
_SELF_SCORE = 8.0


@torch.no_grad()
def start_eagle3(
    module: Eagle3Module, target: Target, batches: Sequence[Batch], scale: Tensor, seed: int
) -> None:
    """Head and final norm of the target; `fc` and the attention's values solve for the target's next state.

    With h the captured states at t and e the embedding of token t + 1 (RMS-normalised), the layer starts as
    x = A h + B e, where A and B minimise |x - u|^2 against u, the target's final state at t + 1 before the
    norm's weight. A becomes `fc`; B is split into `v_proj` and `o_proj`; queries and keys start equal, so
    that a position attends to itself; the MLP starts at zero output.

    Args:
        scale: what the objective divides the captured states by, [n H].
    """
    _randomise(module, seed)
    config, layer = module.config, module.midlayer
    norm_weight: Tensor = target.model.model.norm.weight.detach()
    module.lm_head.weight.copy_(target.lm_head_weight[module.draft_to_target])
    module.norm.weight.copy_(norm_weight)
    solution = _least_squares(
        (
            torch.cat(
                (
                    module.fc_inputs(module.reads(batch.captured, batch.final)),
                    _normalised(_next_embedding(batch, target)),
                ),
                dim=-1,
            ),
            batch.final / norm_weight,
            batch,
        )
        for batch in batches
    )
    width = config.num_captured * config.hidden_size
    module.fc.weight.copy_(solution[:, :width] * scale)
    _attend_to_itself(
        layer.self_attn, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )
    _carry(layer.self_attn, solution[:, width:], config.num_attention_heads, config.num_key_value_heads)
    layer.mlp.down_proj.weight.zero_()


@torch.no_grad()
def start_eagle(module: EagleModule, target: Target, batches: Sequence[Batch], seed: int) -> None:
    """`fc` solves for the next feature from embedding and feature; attention and MLP start at zero output."""
    _randomise(module, seed)
    solution = _least_squares(
        (torch.cat((_next_embedding(batch, target), batch.final), dim=-1), batch.final, batch)
        for batch in batches
    )
    module.fc.weight.copy_(solution)
    module.fc.bias.zero_()
    layer = module.layers[0]
    assert isinstance(layer, EagleLayer)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


@torch.no_grad()
def state_scale(module: Eagle3Module, batches: Iterable[Batch]) -> Tensor:
    """Root mean square of each captured dimension, [n H]; ones for a module that normalises them itself.

    A few dimensions of a target's residual stream are hundreds of times larger than the rest. One learning
    rate for weights on both either leaves the small ones untrained or blows the large ones up.
    """
    if module.config.fc_norm:
        return torch.ones(module.fc.weight.shape[1])
    total, count = torch.zeros(()), 0
    for batch in batches:
        read = module.reads(batch.captured, batch.final)
        total = total + read.double().square().sum((0, 1))  # padding is zero
        count += int((batch.lengths - 1).sum())
    return (total / count).sqrt().clamp_min(1e-6).float()


def _next_embedding(batch: Batch, target: Target) -> Tensor:
    """The embedding of token t + 1 at position t, [B, T, H]."""
    return F.embedding(batch.token_ids.roll(-1, dims=1), target.embed_weight.float())


def _normalised(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _least_squares(parts: Iterable[tuple[Tensor, Tensor, Batch]]) -> Tensor:
    """W [H, F] that minimises sum |W inputs[t] - goals[t + 1]|^2 over all positions where both exist.

    Each part holds inputs [B, T, F] and goals [B, T, H]; goals[t + 1] is the state at the next position.
    """
    gram: Tensor | None = None
    cross: Tensor | None = None
    for inputs, goals, batch in parts:
        positions = torch.arange(inputs.shape[1])[None]
        rows, columns = (positions + 2 < batch.lengths[:, None]).nonzero(as_tuple=True)
        x, y = inputs[rows, columns], goals[rows, columns + 1]
        products = (x.T @ x).double(), (x.T @ y).double()
        gram = products[0] if gram is None else gram + products[0]
        cross = products[1] if cross is None else cross + products[1]
    assert gram is not None
    assert cross is not None
    scale = gram.diagonal().clamp_min(1e-12).sqrt()  # states of very different size are equally important
    scaled = gram / scale[:, None] / scale[None] + _RIDGE * torch.eye(len(gram), dtype=torch.float64)
    return (torch.linalg.solve(scaled, cross / scale[:, None]) / scale[:, None]).T.float()


def _attend_to_itself(attention: DraftAttention, heads: int, kv_heads: int, head_dim: int) -> None:
    """Keys equal to queries: a token scores its squared length against itself, about zero against others."""
    keys = attention.k_proj.weight.view(kv_heads, head_dim, -1)
    # Inputs are RMS-normalised, so a query of rows of variance v has squared length head_dim * inputs * v.
    keys.mul_((_SELF_SCORE / head_dim**0.5) ** 0.5)
    attention.q_proj.weight.copy_(keys.repeat_interleave(heads // kv_heads, dim=0).flatten(0, 1))


def _carry(attention: DraftAttention, matrix: Tensor, heads: int, kv_heads: int) -> None:
    """Let values and output carry `matrix` [H, H] from the embedding's half, to the rank that fits."""
    left, singular, right = torch.linalg.svd(matrix)
    rank = attention.v_proj.weight.shape[0]
    root = singular[:rank].sqrt()
    hidden = matrix.shape[0]
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[: len(root), :hidden] = root[:, None] * right[:rank]
    outputs = torch.zeros(hidden, rank)
    outputs[:, : len(root)] = left[:, :rank] * root
    group = heads // kv_heads
    shared = (
        outputs.view(hidden, kv_heads, 1, -1).expand(-1, -1, group, -1) / group
    )  # the heads of a group add up
    attention.o_proj.weight.copy_(shared.reshape(hidden, -1))


def _randomise(module: nn.Module, seed: int) -> None:
    """Every matrix from a normal distribution of variance 1 / inputs, seeded; norms stay at one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
