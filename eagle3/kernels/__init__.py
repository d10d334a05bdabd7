"""The arithmetic of a decoder layer at inference: compiled for few rows on a CPU, plain torch elsewhere."""

from eagle3.kernels.ops import Linear, Ops, select_ops

__all__ = ["Linear", "Ops", "select_ops"]
