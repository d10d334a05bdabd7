"""The operations of a decoder layer at inference, in two implementations behind one interface."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.kernels.build import load_kernels


class Linear(Protocol):
    """y = x @ W.T + bias for fixed weights."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [..., K] -> [..., N]


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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...  # [..., 2 I] -> [..., I]

    def attention(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        layer: int,
        mask: Tensor | None,
        norms: tuple[Tensor, Tensor, float] | None,
        query_heads: int,
    ) -> Tensor:
        """Rotate, append to the cache and attend.

        Args:
            qkv: [B, T, (Hq + 2 Hkv) D], queries, keys and values of T new tokens of each row.
            cos, sin: rotary tables of the new positions, [B, T, D].
            cache: keys and values go to each row's slots length .. length + T - 1; lengths do not change.
            layer: the layer of the cache.
            mask: bool [T, S] or [B, T, S] over the last S >= T slots, the new ones included: new token i
                sees slot j. All slots before those are seen. None is causal over the new ones.
            norms: query and key RMS-norm weights [D] and epsilon (Qwen3), or None.
            query_heads: Hq.

        Returns:
            [B, T, Hq D]
        """
        ...


class TorchOps:
    """Plain torch: any device and dtype."""

    name = "torch"

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def linear(self, weight: Tensor, bias: Tensor | None = None, held: torch.dtype | None = None) -> Linear:
        assert held in (None, weight.dtype)  # models.draft.check_weights refuses the rest
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attention(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        layer: int,
        mask: Tensor | None,
        norms: tuple[Tensor, Tensor, float] | None,
        query_heads: int,
    ) -> Tensor:
        batch, count, _ = qkv.shape
        kv_heads, head_dim = cache.keys.shape[2], cache.keys.shape[4]
        heads = qkv.view(batch, count, query_heads + 2 * kv_heads, head_dim).transpose(
            1, 2
        )  # [B, heads, T, D]
        q, k, v = heads.split([query_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], norms[2]), self.rms_norm(k, norms[1], norms[2])
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, D]
        q, k = q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin
        visible = _visibility(cache, count, mask, qkv.device)  # before the lengths change
        keys, values = cache.append(layer, k, v)
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, enable_gqa=query_heads != kv_heads
        )  # [B, Hq, T, D]
        return out.transpose(1, 2).reshape(batch, count, query_heads * head_dim)


class CompiledOps:
    """The kernels of decoder.cpp: float32 arithmetic on a CPU, weights in float32, bfloat16 or int8."""

    name = "compiled"

    def __init__(self) -> None:
        library = load_kernels()
        assert library is not None
        self._library = library

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return torch.float32

    def linear(self, weight: Tensor, bias: Tensor | None = None, held: torch.dtype | None = None) -> Linear:
        scales: Tensor | None = None
        if held == torch.int8:
            weight, scales = quantise(weight)
        elif (held or weight.dtype) == torch.bfloat16:
            weight = weight.bfloat16()
        else:
            weight = weight.float()  # the kernels know no float16
        outputs, inputs = weight.shape
        panels = -(-outputs // 16)
        padded = torch.zeros(panels * 16, inputs, dtype=weight.dtype)
        padded[:outputs] = weight
        packed = padded.view(panels, 16, inputs).transpose(1, 2).contiguous()  # [N / 16, K, 16]
        bias = None if bias is None else bias.float().contiguous()
        kernel = {
            torch.float32: self._library.linear_float32,
            torch.bfloat16: self._library.linear_bfloat16,
            torch.int8: self._library.linear_int8,
        }[weight.dtype]
        pointers: list[int | None] = [packed.data_ptr()]
        if scales is not None:
            pointers.append(scales.data_ptr())
        pointers.append(None if bias is None else bias.data_ptr())

        def apply(x: Tensor) -> Tensor:
            _ = packed, scales, bias  # keeps the memory behind the pointers
            x = x.contiguous()
            y = torch.empty(*x.shape[:-1], outputs)
            kernel(x.data_ptr(), *pointers, y.data_ptr(), x.numel() // inputs, outputs, inputs)
            return y

        return apply

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), weight.shape[0]
        y = torch.empty_like(x)
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, eps)
        return y

    def swiglu(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        y = torch.empty(*gate_up.shape[:-1], width)
        self._library.swiglu(gate_up.data_ptr(), y.data_ptr(), gate_up.numel() // (2 * width), width)
        return y

    def attention(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        layer: int,
        mask: Tensor | None,
        norms: tuple[Tensor, Tensor, float] | None,
        query_heads: int,
    ) -> Tensor:
        batch, count, _ = qkv.shape
        keys, values = cache.keys[layer], cache.values[layer]  # [B, Hkv, C, D]
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        cache.require(count)
        lengths = torch.tensor(cache.lengths)
        bytes_mask = None if mask is None else mask.contiguous().view(torch.uint8)
        q_norm, k_norm, eps = norms if norms is not None else (None, None, 0.0)
        out = torch.empty(batch, count, query_heads * head_dim)
        self._library.attention(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            lengths.data_ptr(),
            None if bytes_mask is None else bytes_mask.data_ptr(),
            mask[0].numel() if mask is not None and mask.dim() == 3 else 0,
            head_dim**-0.5,
            out.data_ptr(),
            batch,
            count,
            query_heads,
            kv_heads,
            head_dim,
            count if mask is None else mask.shape[-1],
        )
        return out


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights and one float32 scale an output: weight[n] is about scales[n] * result[n].

    Worked: a row (0.5, -1.27, 0.004) has the scale 1.27 / 127 = 0.01 and becomes (50, -127, 0). No weight
    moves by more than half a scale.

    Args:
        weight: [N, K].

    Returns:
        int8 [N, K] and float32 [N].
    """
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    steps = weight / torch.where(scales > 0, scales, 1.0)[:, None]
    return steps.round().to(torch.int8), scales


def select_ops(device: torch.device | str, compiled: bool = True) -> Ops:
    """The compiled kernels on a CPU (where a compiler is found and `compiled` is true), else plain torch."""
    if compiled and torch.device(device).type == "cpu" and load_kernels() is not None:
        return CompiledOps()
    return TorchOps()


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
