"""A head and prompt lookup together: copied spans cost no draft, everything else is drafted by the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.prompt_lookup import NgramIndex
from eagle3.decoding.sampling import Sampling

if TYPE_CHECKING:
    from eagle3.models.target import TargetOutput


class HybridDrafter:
    """Where the sequence ends in an n-gram that occurred before, drafts what followed it; else as the head.

    The head takes in every accepted token either way, so its cache is that of a head used alone.
    """

    def __init__(self, head: EagleDrafter, num_steps: int, *, max_ngram: int, min_ngram: int) -> None:
        """
        Args:
            num_steps: most tokens copied in one round.
            max_ngram, min_ngram: length of the endings looked up.

        Raises:
            ValueError: for a chain or n-gram length below 1.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps = {num_steps}: must be at least 1")
        self._head, self._num_steps = head, num_steps
        self._sizes = (min_ngram, max_ngram)
        self._index = NgramIndex(*self._sizes)
        self.max_nodes = max(head.max_nodes, num_steps + 1)

    def start(
        self, prompt_ids: Sequence[int], token: int, output: TargetOutput, sampling: Sampling, slots: int
    ) -> None:
        """See `Drafter.start`."""
        self._head.start(prompt_ids, token, output, sampling, slots)
        self._index = NgramIndex(*self._sizes)
        self._index.extend([*prompt_ids, token])

    def propose(self) -> DraftTree:
        """See `Drafter.propose`."""
        copied = self._index.continuation(self._num_steps)
        return DraftTree.chain([self._index.tokens[-1], *copied]) if copied else self._head.propose()

    def update(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """See `Drafter.update`."""
        self._head.update(tokens, output)
        self._index.extend(tokens)
