"""Speculative sampling with an independent small model (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache, ReusableCache
from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.sampling import Randomness, Sampling, argmax, probabilities
from eagle3.decoding.vanilla import context_length
from eagle3.models.independent import check_same_vocabulary

if TYPE_CHECKING:
    from eagle3.models.target import Target, TargetOutput


class IndependentDrafter:
    """A chain decoded by a small model of the same vocabulary: its argmax at T=0, its samples otherwise."""

    def __init__(self, model: Target, target: Target, num_steps: int) -> None:
        """
        Raises:
            ValueError: for a vocabulary other than the target's, or a chain length below 1.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps = {num_steps}: must be at least 1")
        check_same_vocabulary(model.vocab_size, model.tokenizer, target)
        self.model = model
        self.num_steps = num_steps
        self.max_nodes = num_steps + 1
        self._context = context_length(model)
        self._caches = ReusableCache(model.new_cache, self._context)
        self._cache: KVCache
        self._pending: list[int]  # tokens of the sequence that the model has not processed
        self._sampling: Sampling
        self._randomness: Randomness

    def start(
        self, prompt_ids: Sequence[int], token: int, output: TargetOutput, sampling: Sampling, slots: int
    ) -> None:
        """See `Drafter.start`.

        Raises:
            ValueError: if the sequence may grow beyond the draft model's context.
        """
        if slots > self._context:
            raise ValueError(
                f"the request needs {slots} positions, the draft model has {self._context}: shorten the "
                "prompt or lower max_new_tokens"
            )
        self._cache = self._caches.reserve(slots)
        self._forward(prompt_ids, logits="none")
        self._pending = [token]
        self._sampling = sampling
        self._randomness = Randomness(sampling.seed, stream="draft")

    def propose(self) -> DraftTree:
        """See `Drafter.propose`."""
        chain = [self._pending[-1]]
        drawn_from: list[Tensor] = []
        inputs = self._pending
        self._kept = self._cache.lengths[0] + len(inputs)
        for _ in range(self.num_steps):
            logits = self._forward(inputs, logits="last")
            assert logits is not None
            if self._sampling.greedy:
                chain.append(argmax(logits[0, -1]))
            else:
                drawn_from.append(probabilities(logits[0, -1], self._sampling))
                chain.append(self._randomness.draw(drawn_from[-1]))
            inputs = chain[-1:]
        return DraftTree.chain(chain, None if self._sampling.greedy else drawn_from)

    def update(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """See `Drafter.update`."""
        # The cache holds the sequence up to the root and the drafted tokens but the last, which was not fed.
        kept = min(len(tokens) - 1, self.num_steps - 1)
        self._cache.truncate(self._kept + kept)
        self._pending = list(tokens[kept:])

    def _forward(self, tokens: Sequence[int], logits: str) -> Tensor | None:
        first, device = self._cache.lengths[0], self.model.device
        ids = torch.tensor([list(tokens)], device=device)
        positions = torch.arange(first, first + len(tokens), device=device)[None]
        return self.model.forward(ids, positions, self._cache, logits=logits).logits
