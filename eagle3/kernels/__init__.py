"""The arithmetic of a decoder layer at inference: compiled for few rows on a CPU, plain torch elsewhere."""

from eagle3.kernels.ops import AttentionWeights, Linear, Norm, Ops
from eagle3.kernels.select import select_ops

__all__ = ["AttentionWeights", "Linear", "Norm", "Ops", "select_ops"]
