"""What the machine allows: how fast it reads weights and multiplies, and what that means for a forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eagle3.decoding.vanilla import clock
from eagle3.kernels import select_ops
from eagle3.models.target import Target

_REPEATS = 5
_READ_BYTES = 1 << 28  # far beyond any cache
_WIDTH = 512  # of the block's rows
_MATRIX = 1024


def measure_bound(target: Target) -> dict[str, float]:
    """Speeds of this machine, the best of some runs, and what they mean for a forward of the target.

    Every forward reads all weights of its linear layers once, and each token costs two operations a weight.
    Reading is measured by the sum of a large block and by its product with one row in the operations that the
    target decodes with, whichever is faster; arithmetic by a matrix product in torch, in the dtype that the
    target's activations have.
    """
    weights = sum(
        parameter.numel()
        for name, parameter in target.model.named_parameters()
        if parameter.dim() == 2 and "embed_tokens" not in name
    )
    if target.model.config.tie_word_embeddings:
        weights += target.embed_weight.numel()  # one matrix, read as the head
    element = target.embed_weight.element_size()
    block = torch.ones(_READ_BYTES // (_WIDTH * 4), _WIDTH, device=target.device)
    row = torch.ones(1, _WIDTH, device=target.device)
    product = select_ops(target.device, target.kernels == "compiled").linear(block)
    reading = min(_seconds(lambda: block.sum(), target.device), _seconds(lambda: product(row), target.device))
    bandwidth = _READ_BYTES / reading
    matrix = torch.randn(_MATRIX, _MATRIX, device=target.device).to(target.activation_dtype)
    arithmetic = 2 * _MATRIX**3 / _seconds(lambda: matrix @ matrix, target.device)
    return {
        "weights_mb": weights * element / 1e6,
        "bandwidth_gb_s": bandwidth / 1e9,
        "arithmetic_gflop_s": arithmetic / 1e9,
        "read_ms": 1e3 * weights * element / bandwidth,
        "arithmetic_ms_per_token": 1e3 * 2 * weights / arithmetic,
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of a call, in seconds, after one that is not timed."""
    now, seconds = clock(device), []
    for repeat in range(_REPEATS + 1):
        began = now()
        run()
        ended = now()
        if repeat:
            seconds.append(ended - began)
    return min(seconds)
