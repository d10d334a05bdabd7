"""One decoder layer at inference: packed projections, RMS norms, rotary tables, cached attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.kernels import AttentionWeights, Linear, Norm, Ops


class Rotary:
    """Cosine and sine tables of a rotary embedding whose frequencies do not depend on the sequence length."""

    def __init__(self, rotary_embedding: nn.Module, device: torch.device | str) -> None:
        kind = getattr(rotary_embedding, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"rope type {kind!r} changes its frequencies with the length of the context, which a KV "
                "cache of rotated keys cannot follow; use a target with rope type default, linear, llama3 "
                "or yarn"
            )
        self._module = rotary_embedding
        self._device = device
        self._cos = self._sin = torch.empty(0)

    def tables(self, positions: Tensor, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [B, T, D], for positions [B, T] in a cache of `capacity` slots.

        The positions themselves are not looked at: on a GPU that would wait for the device in every forward.
        """
        if capacity > self._cos.shape[0] or self._cos.dtype != dtype:
            size = max(1024, 1 << (capacity - 1).bit_length())
            grid = torch.arange(size, device=self._device)[None]
            cos, sin = self._module(torch.empty(0, dtype=dtype, device=self._device), grid)
            self._cos, self._sin = cos[0].to(dtype).contiguous(), sin[0].to(dtype).contiguous()
        return self._cos[positions], self._sin[positions]


class InferenceLayer:
    """The weights of one pre-norm decoder layer, fused and packed for inference.

    `attend` and `feed_forward` are its two halves, so that the target (one input) and the drafts (embedding
    beside hidden state) share them.
    """

    def __init__(
        self,
        attention: Any,
        mlp: Any,
        mlp_norm: Any,
        ops: Ops,
        query_heads: int,
        head_dim: int,
        eps: float,
        attention_norm: Any = None,
        held: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            attention, mlp: modules with the projections of transformers' layers, under their names.
            mlp_norm, attention_norm: RMS norm modules of the two halves' inputs, with epsilon `eps`.
            held: the dtype that their weights are kept in, as they are if None (`Ops.linear`).
        """
        query_norm = key_norm = None
        if hasattr(attention, "q_norm"):  # Qwen3
            query_norm = _norm(ops, attention.q_norm, float(attention.q_norm.variance_epsilon))
            key_norm = _norm(ops, attention.k_norm, float(attention.k_norm.variance_epsilon))
        self.attend = ops.attention(
            AttentionWeights(
                qkv=_side_by_side(ops, held, attention.q_proj, attention.k_proj, attention.v_proj),
                output=linear_of(ops, attention.o_proj, held),
                query_heads=query_heads,
                kv_heads=attention.k_proj.out_features // head_dim,
                head_dim=head_dim,
                norm=None if attention_norm is None else _norm(ops, attention_norm, eps),
                query_norm=query_norm,
                key_norm=key_norm,
            )
        )
        gate_up = _side_by_side(ops, held, mlp.gate_proj, mlp.up_proj)
        self.feed_forward = ops.feed_forward(
            _norm(ops, mlp_norm, eps), gate_up, linear_of(ops, mlp.down_proj, held)
        )


def linear_of(ops: Ops, module: nn.Module, held: torch.dtype | None = None) -> Linear:
    """The inference form of an nn.Linear; `held` as in `Ops.linear`."""
    assert isinstance(module, nn.Linear)
    return ops.linear(module.weight.detach(), None if module.bias is None else module.bias.detach(), held)


def _side_by_side(ops: Ops, held: torch.dtype | None, *modules: nn.Linear) -> Linear:
    """Several nn.Linear of one input as one, their outputs side by side."""
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    assert len(biases) in (0, len(modules))
    weight = torch.cat([module.weight.detach() for module in modules])
    return ops.linear(weight, torch.cat(biases) if biases else None, held)


def norm_of(ops: Ops, module: nn.Module, eps: float) -> Callable[[Tensor], Tensor]:
    """The inference form of an RMS norm module."""
    norm = _norm(ops, module, eps)
    return lambda x: ops.rms_norm(x, norm)


def _norm(ops: Ops, module: nn.Module, eps: float) -> Norm:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return Norm(weight.detach().to(ops.activation_dtype(weight.dtype)).contiguous(), eps)
