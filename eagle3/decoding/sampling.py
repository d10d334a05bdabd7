"""From logits to the next token: greedy, or temperature / top-k / top-p with a seeded random stream."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; top_k 0 and top_p 1 switch those filters off.

    Raises:
        ValueError: for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature = {self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1 (off)")

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the logits."""
        return self.temperature == 0


class Randomness:
    """A seeded stream of random decisions. Decoding makes no other use of chance."""

    def __init__(self, seed: int, stream: str = "target") -> None:
        """Streams of one seed with different names are independent."""
        self._random = random.Random(f"{stream}:{seed}")

    def accept(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def draw(self, weights: Tensor) -> int:
        """An index with probability proportional to its weight (inverse of the cumulative sum).

        Args:
            weights: non-negative, not all zero, not necessarily normalised, [V].
        """
        cumulative = weights.double().cumsum(0)
        total = float(cumulative[-1])
        assert 0 < total < math.inf, "weights must be finite with a positive sum"
        # Strictly below the total, so that the index found has a positive weight.
        point = min(self._random.random() * total, math.nextafter(total, 0.0))
        return int(torch.searchsorted(cumulative, point, right=True))


class TokenChooser:
    """Chooses tokens one by one; every token of a sequence, bonus tokens included, goes through it.

    At temperature > 0 one token takes one random number, whoever decodes. So a decoder that chooses token by
    token draws, for a given seed, the same tokens as any other such decoder.
    """

    def __init__(self, sampling: Sampling, randomness: Randomness | None = None) -> None:
        self.sampling = sampling
        self.randomness = randomness or Randomness(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token for logits [V]."""
        if self.sampling.greedy:
            return argmax(logits)
        return self.randomness.draw(probabilities(logits, self.sampling))


def argmax(logits: Tensor) -> int:
    """The smallest index of the maximum of logits [V]."""
    if logits.device.type == "cpu":
        # On one row numpy is several times faster than torch, and it takes the first of equal maxima.
        return int(logits.float().numpy().argmax())
    return int(logits.argmax())


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution a token is sampled from: temperature, then top-k, then top-p, then renormalised.

    The order and the edge cases are those of transformers' logits processors: tokens tied with the k-th are
    kept; top-p keeps the smallest set of most likely tokens whose mass reaches `top_p`, at least one.

    Args:
        logits: [V].
        sampling: with temperature > 0.

    Returns:
        float32 probabilities, [V].
    """
    assert not sampling.greedy
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[0]:
        threshold = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -math.inf)
    result = scores.softmax(0)
    return result if sampling.top_p == 1 else _nucleus(result, sampling.top_p)


def _nucleus(result: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens that together reach `top_p`, renormalised. [V] -> [V]."""
    size = result.shape[0]
    width = min(256, size)
    while True:  # a full sort of a large vocabulary costs more than a forward of a small draft
        values, ids = result.topk(width)
        cumulative = values.cumsum(0)
        if width == size or float(cumulative[-1]) >= top_p:
            break
        width = min(width * 8, size)
    before = cumulative - values
    kept = max(1, int((before < top_p).sum()))
    nucleus = torch.zeros_like(result)
    nucleus[ids[:kept]] = values[:kept] / cumulative[kept - 1]
    return nucleus
