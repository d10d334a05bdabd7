"""The operations of a decoder layer by the CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.kernels.build import AttentionLayer, FeedForwardLayer, LinearLayer, load_kernels
from eagle3.kernels.ops import Attention, AttentionWeights, Linear, Norm


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
        return CompiledLinear(self._library, weight, scales, bias)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        x, width = x.contiguous(), norm.weight.shape[0]
        y = torch.empty_like(x)
        rows = x.numel() // width
        self._library.rms_norm(x.data_ptr(), norm.weight.data_ptr(), y.data_ptr(), rows, width, norm.eps)
        return y

    def attention(self, weights: AttentionWeights) -> Attention:
        qkv, output = weights.qkv, weights.output
        assert isinstance(qkv, CompiledLinear)
        assert isinstance(output, CompiledLinear)
        norms = [weights.norm, weights.query_norm, weights.key_norm]
        layer_weights = AttentionLayer(
            qkv.layer,
            output.layer,
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
            weights.query_heads,
            weights.kv_heads,
            weights.head_dim,
            0.0 if weights.norm is None else weights.norm.eps,
            0.0 if weights.query_norm is None else weights.query_norm.eps,
        )
        kernel, address = self._library.attention_layer, ctypes.addressof(layer_weights)

        def apply(
            x: Tensor,
            residual: Tensor,
            rotary: tuple[Tensor, Tensor],
            cache: KVCache,
            layer: int,
            mask: Tensor | None,
        ) -> Tensor:
            _ = weights, layer_weights  # keeps the memory behind the pointers
            batch, count, _ = x.shape
            x, residual = x.contiguous(), residual.contiguous()
            keys, values = cache.keys[layer], cache.values[layer]  # [B, Hkv, C, D]
            cache.require(count)
            mask = None if mask is None else mask.contiguous()
            y = torch.empty_like(residual)
            kernel(
                address,
                x.data_ptr(),
                residual.data_ptr(),
                rotary[0].data_ptr(),
                rotary[1].data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                keys.stride(0),
                keys.stride(1),
                (ctypes.c_int64 * batch)(*cache.lengths),
                None if mask is None else mask.data_ptr(),
                mask[0].numel() if mask is not None and mask.dim() == 3 else 0,
                y.data_ptr(),
                batch,
                count,
                count if mask is None else mask.shape[-1],
            )
            return y

        return apply

    def feed_forward(self, norm: Norm, gate_up: Linear, down: Linear) -> Callable[[Tensor], Tensor]:
        assert isinstance(gate_up, CompiledLinear)
        assert isinstance(down, CompiledLinear)
        layer_weights = FeedForwardLayer(gate_up.layer, down.layer, norm.weight.data_ptr(), norm.eps)
        kernel, address, width = (
            self._library.feed_forward_layer,
            ctypes.addressof(layer_weights),
            norm.weight.shape[0],
        )

        def apply(x: Tensor) -> Tensor:
            _ = norm, gate_up, down, layer_weights  # keeps the memory behind the pointers
            x = x.contiguous()
            y = torch.empty_like(x)
            kernel(address, x.data_ptr(), y.data_ptr(), x.numel() // width)
            return y

        return apply


class CompiledLinear:
    """A `Linear` of the kernels, and what they are told of it."""

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> None:
        """
        Args:
            weight: [N, K] in float32, bfloat16 or int8.
            scales: of int8 weights, [N].
            bias: [N].
        """
        together = library.bfloat16_side_by_side() if weight.dtype == torch.bfloat16 else 1
        packed = pack(weight, together)
        bias = None if bias is None else bias.float().contiguous()
        self._kernel, (self._outputs, self._inputs) = library.linear, weight.shape
        self._tensors = packed, scales, bias  # keeps the memory behind the pointers
        self.layer = LinearLayer(
            packed.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self._outputs,
            self._inputs,
            (torch.float32, torch.bfloat16, torch.int8).index(weight.dtype),
        )
        self._address = ctypes.addressof(self.layer)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self._outputs)
        self._kernel(self._address, x.data_ptr(), y.data_ptr(), x.numel() // self._inputs)
        return y


def pack(weight: Tensor, together: int) -> Tensor:
    """Weights [N, K] in the kernels' order: [N / 16, K / together, 16, together], padded with zeros."""
    panels, groups = -(-weight.shape[0] // 16), -(-weight.shape[1] // together)
    padded = torch.zeros(panels * 16, groups * together, dtype=weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(panels, 16, groups, together).transpose(1, 2).contiguous()


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
