"""Which implementation of the operations to compute with."""

from __future__ import annotations

import torch

from eagle3.kernels.build import load_kernels
from eagle3.kernels.compiled_ops import CompiledOps
from eagle3.kernels.ops import Ops
from eagle3.kernels.torch_ops import TorchOps


def select_ops(device: torch.device | str, compiled: bool = True) -> Ops:
    """The compiled kernels on a CPU (where a compiler is found and `compiled` is true), else plain torch."""
    if compiled and torch.device(device).type == "cpu" and load_kernels() is not None:
        return CompiledOps()
    return TorchOps()
