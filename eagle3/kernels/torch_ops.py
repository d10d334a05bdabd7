"""The operations of a decoder layer in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.kernels.ops import Attention, AttentionWeights, Linear, Norm


class TorchOps:
    """Plain torch: any device and dtype."""

    name = "torch"

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def linear(self, weight: Tensor, bias: Tensor | None = None, held: torch.dtype | None = None) -> Linear:
        assert held in (None, weight.dtype)  # models.draft.check_weights refuses the rest
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def attention(self, weights: AttentionWeights) -> Attention:
        def apply(
            x: Tensor,
            residual: Tensor,
            rotary: tuple[Tensor, Tensor],
            cache: KVCache,
            layer: int,
            mask: Tensor | None,
        ) -> Tensor:
            qkv = weights.qkv(x if weights.norm is None else self.rms_norm(x, weights.norm))
            return residual + weights.output(self._attend(weights, qkv, rotary, cache, layer, mask))

        return apply

    def feed_forward(self, norm: Norm, gate_up: Linear, down: Linear) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            gate, up = gate_up(self.rms_norm(x, norm)).chunk(2, dim=-1)
            return x + down(F.silu(gate) * up)

        return apply

    def _attend(
        self,
        weights: AttentionWeights,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        mask: Tensor | None,
    ) -> Tensor:
        """qkv [B, T, (Hq + 2 Hkv) D] -> [B, T, Hq D]."""
        batch, count, _ = qkv.shape
        query_heads, kv_heads, head_dim = weights.query_heads, weights.kv_heads, weights.head_dim
        heads = qkv.view(batch, count, query_heads + 2 * kv_heads, head_dim).transpose(
            1, 2
        )  # [B, heads, T, D]
        q, k, v = heads.split([query_heads, kv_heads, kv_heads], dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            q, k = self.rms_norm(q, weights.query_norm), self.rms_norm(k, weights.key_norm)
        cos, sin = rotary[0][:, None], rotary[1][:, None]  # [B, 1, T, D]
        q, k = q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin
        visible = _visibility(cache, count, mask, qkv.device)  # before the lengths change
        keys, values = cache.append(layer, k, v)
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, enable_gqa=query_heads != kv_heads
        )  # [B, Hq, T, D]
        return out.transpose(1, 2).reshape(batch, count, query_heads * head_dim)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _visibility(cache: KVCache, count: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Slots that each new token sees, bool [B, 1, T, S] with S = longest length + T; None for all."""
    if mask is None and count == 1 and cache.uniform:
        return None
    if mask is None:
        mask = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    masked = mask.shape[-1]
    mask = mask.expand(cache.batch, count, masked)
    longest = cache.max_length
    if cache.uniform:
        past = torch.ones(cache.batch, count, longest + count - masked, dtype=torch.bool, device=device)
        return torch.cat((past, mask), dim=2)[:, None]
    visible = torch.zeros(cache.batch, count, longest + count, dtype=torch.bool, device=device)
    for row, length in enumerate(cache.lengths):
        visible[row, :, : length + count - masked] = True
        visible[row, :, length + count - masked : length + count] = mask[row]
    return visible[:, None]
