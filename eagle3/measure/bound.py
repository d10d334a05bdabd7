"""What the machine allows: how fast it reads weights and multiplies, and what that means for a forward."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from eagle3.decoding.vanilla import clock
from eagle3.models.target import Target

_REPEATS = 5
_READ_BYTES = 1 << 28  # far beyond any cache
_MATRIX = 1024


def measure_bound(target: Target) -> dict[str, float]:
    """Speeds of this machine, measured with plain torch, and what they mean for a forward of the target.

    Every forward reads all weights of its linear layers once, and each token costs two operations a weight.
    Reading is measured by adding up float32 numbers, arithmetic by a matrix product in the dtype that the
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
    block = torch.ones(_READ_BYTES // 4, device=target.device)
    bandwidth = _READ_BYTES / _seconds(lambda: block.sum(), target.device)
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
    """Median seconds of a call after one that is not timed."""
    now, seconds = clock(device), []
    for repeat in range(_REPEATS + 1):
        began = now()
        run()
        ended = now()
        if repeat:
            seconds.append(ended - began)
    return statistics.median(seconds)
