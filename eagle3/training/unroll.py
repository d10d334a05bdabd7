"""Training-time test: the EAGLE-3 draft unrolled over its own hidden states (arXiv 2503.01840, §3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.models.eagle3 import Eagle3Module
from eagle3.training.attention import rotate, test_time_attention


def shift_left(x: Tensor, count: int) -> Tensor:
    """x[:, t] becomes x[:, t + count]; zeros enter on the right. [B, T, ...]"""
    if count == 0:
        return x
    shifted = torch.zeros_like(x)
    shifted[:, : x.shape[1] - count] = x[:, count:]
    return shifted


def choose_positions(candidates: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The positions of each row that draft steps after the first are made at, and what each stands for.

    K is `share` of T, rounded up. The candidates of a row are drawn evenly; a row with fewer than K of them
    is filled up with other positions, which carry no loss.

    Worked, K = 10: of a row with 30 candidates 10 are drawn, and each stands for 3. One with 8 is drawn whole
    and each stands for itself; else its positions would count three times as much as those of the long row.

    Args:
        candidates: [B, T] bool.

    Returns:
        Positions, ascending, [B, K]; candidates of the row by those drawn, [B, 1].
    """
    count = math.ceil(share * candidates.shape[1])
    drawn = torch.rand(candidates.shape, generator=generator).to(candidates.device)
    chosen = (drawn + candidates).topk(count, dim=1).indices.sort(dim=1).values
    found = candidates.gather(1, chosen).sum(dim=1, keepdim=True)
    return chosen, candidates.sum(dim=1, keepdim=True) / found.clamp_min(1)


@dataclass
class Unroll:
    """The draft at training: one call of `step` a draft step, each reading the output of the one before.

    Alignment, worked on the row x0 x1 x2 x3 x4 with target states h0..h4, position t = 1. Step 0 reads the
    embedding of x2 beside g1 (fused from h1) and predicts x3. Step 1 reads x3 beside its own output of step 0
    at t = 1 and predicts x4. So at step i position t reads token t + 1 + i, predicts token t + 2 + i, and has
    rotary position t + i. Only the hidden state is self-generated: the tokens are the row's own.

    A step after the first reads nothing that other positions made in steps after the first, so that it can be
    made at a few positions alone: each of them is what it would be among all.
    """

    module: Eagle3Module
    embedding: Tensor  # [V, H] the target's, frozen
    rotary: nn.Module
    _keys: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)

    def steps(
        self, token_ids: Tensor, captured: Tensor, count: int, chosen: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the layer output of each of `count` steps before the final norm: [B, T, H], then [B, K, H].

        Args:
            token_ids: [B, T].
            captured: the target's captured states, [B, T, n H].
            chosen: [B, K], the positions of steps after the first; None: all, K = T.
        """
        hidden = self.module.fuse(captured)
        for step in range(count):
            shifted = shift_left(token_ids, step + 1)
            if step > 0 and chosen is not None:
                shifted = shifted.gather(1, chosen)
            output = self._step(step, shifted, hidden, chosen)
            yield output
            hidden = self.module.feed_back(output)
            if step == 0 and chosen is not None:
                hidden = hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[-1]))

    def _step(self, step: int, token_ids: Tensor, hidden: Tensor, chosen: Tensor | None) -> Tensor:
        layer, config = self.module.midlayer, self.module.config
        batch, length = token_ids.shape
        embedded = F.embedding(token_ids, self.embedding).to(hidden.dtype)
        normed = layer.hidden_norm(hidden)
        inputs = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
        attention = layer.self_attn
        every = torch.arange(length, device=hidden.device)[None]  # [1, T]
        at = every if step == 0 or chosen is None else chosen
        # [B or 1, 1, length, D]
        cos, sin = (table[:, None].to(hidden.dtype) for table in self.rotary(hidden, at + step))

        def heads(x: Tensor) -> Tensor:
            return x.view(batch, length, -1, config.head_dim).transpose(1, 2)

        query = rotate(heads(attention.q_proj(inputs)), cos, sin)
        self._keys.append(rotate(heads(attention.k_proj(inputs)), cos, sin))
        self._values.append(heads(attention.v_proj(inputs)))
        attended = test_time_attention(query, self._keys, self._values, chosen)  # [B, Hq, length, D]
        x = (normed if config.norm_before_residual else hidden) + attention.o_proj(
            attended.transpose(1, 2).reshape(batch, length, -1)
        )
        return x + layer.mlp(layer.post_attention_layernorm(x))
