"""Prompt lookup decoding: draft what followed the last occurrence of the current n-gram. No model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.sampling import Sampling

if TYPE_CHECKING:
    from eagle3.models.target import TargetOutput


class NgramIndex:
    """Where each n-gram of a growing sequence last occurred; one dictionary look-up a length."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram = {min_ngram}, max_ngram = {max_ngram}: need 1 <= min_ngram <= max_ngram"
            )
        self._sizes = range(min_ngram, max_ngram + 1)
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The n-grams ending with the very last token stay out: they would find themselves."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        for end in range(max(first, 1), len(self.tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.tokens[end - size : end])] = end

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the last earlier occurrence of the longest known ending."""
        for size in reversed(self._sizes):
            end = self._ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                return self.tokens[end : end + count]
        return []


class PromptLookupDrafter:
    """A chain copied from the context (github.com/apoorvumang/prompt-lookup-decoding); no match, no draft."""

    def __init__(self, num_steps: int = 10, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """
        Raises:
            ValueError: for a chain or n-gram length below 1.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps = {num_steps}: must be at least 1")
        self.num_steps = num_steps
        self.max_nodes = num_steps + 1
        self._sizes = (min_ngram, max_ngram)
        self._index = NgramIndex(*self._sizes)

    def start(
        self, prompt_ids: Sequence[int], token: int, output: TargetOutput, sampling: Sampling, slots: int
    ) -> None:
        """See `Drafter.start`."""
        self._index = NgramIndex(*self._sizes)
        self._index.extend([*prompt_ids, token])

    def propose(self) -> DraftTree:
        """See `Drafter.propose`."""
        return DraftTree.chain([self._index.tokens[-1], *self._index.continuation(self.num_steps)])

    def update(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """See `Drafter.update`."""
        self._index.extend(tokens)
