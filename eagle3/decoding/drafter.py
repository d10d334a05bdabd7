"""What the speculative engine asks of a drafter, be it a head on the target, a model or an n-gram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.sampling import Sampling

if TYPE_CHECKING:
    from eagle3.models.target import TargetOutput


class Drafter(Protocol):
    """Proposes trees of draft tokens for one sequence. A wrong proposal costs time, never a token."""

    max_nodes: int
    """Most nodes of a tree, root included."""

    def start(
        self, prompt_ids: Sequence[int], token: int, output: TargetOutput, sampling: Sampling, slots: int
    ) -> None:
        """Begin a new sequence; the time counts as prefill.

        Args:
            prompt_ids: n tokens.
            token: chosen by the target after the prompt; the root of the first tree.
            output: the target's output over the prompt, [1, n, ...].
            sampling: how the target chooses its tokens.
            slots: most tokens that the sequence and one tree can reach.
        """

    def propose(self) -> DraftTree:
        """A tree below the last token of the sequence."""

    def update(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Take in what verification decided.

        Args:
            tokens: accepted drafted tokens, then the bonus token; T in all.
            output: the target's output at the accepted path, the root first, [1, T, ...]. So entry i is the
                state that `tokens[i]` was predicted from.
        """
