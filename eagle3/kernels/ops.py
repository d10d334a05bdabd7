"""The operations of a decoder layer at inference: one interface, two implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache


class Linear(Protocol):
    """y = x @ W.T + bias for fixed weights."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [..., K] -> [..., N]


@dataclass(frozen=True)
class Norm:
    """The weight and epsilon of an RMS norm."""

    weight: Tensor  # [H]
    eps: float


@dataclass(frozen=True)
class AttentionWeights:
    """The attention half of a decoder layer: residual + output(attention(qkv(norm(x))))."""

    qkv: Linear  # [..., width] -> [..., (Hq + 2 Hkv) D]
    output: Linear  # [..., Hq D] -> [..., H]
    query_heads: int
    kv_heads: int
    head_dim: int
    norm: Norm | None = None  # of the input
    query_norm: Norm | None = None  # of each head (Qwen3), with `key_norm` or neither
    key_norm: Norm | None = None


class Attention(Protocol):
    """The attention half of a layer, made by `Ops.attention`."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Rotate, append to the cache, attend, project and add to the residual.

        Args:
            x: [B, T, width], T new tokens of each row.
            residual: what the result is added to, [B, T, H].
            rotary: cosines and sines of the new positions, [B, T, D] each.
            cache: keys and values go to each row's slots length .. length + T - 1; lengths do not change.
            layer: the layer of the cache.
            mask: bool [T, S] or [B, T, S] over the last S >= T slots, the new ones included: new token i
                sees slot j. All slots before those are seen. None is causal over the new ones.

        Returns:
            [B, T, H]
        """
        ...


class Ops(Protocol):
    """What the target and the drafts compute with. Activations have one dtype, `activation_dtype`."""

    name: str

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype: ...

    def linear(self, weight: Tensor, bias: Tensor | None = None, held: torch.dtype | None = None) -> Linear:
        """
        Args:
            weight: [N, K].
            bias: [N].
            held: the dtype that the weights are kept in, as they are if None. int8 rounds them (`quantise`).
        """
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def attention(self, weights: AttentionWeights) -> Attention: ...

    def feed_forward(self, norm: Norm, gate_up: Linear, down: Linear) -> Callable[[Tensor], Tensor]:
        """x + down(silu(gate) * up) with [gate | up] = gate_up(norm(x)): [..., H] -> [..., H]."""
        ...
