"""Drafting with an EAGLE or EAGLE-3 head: chains, dynamic trees (EAGLE-2/3), EAGLE-1's static tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache, ReusableCache
from eagle3.decoding.draft_tree import DraftTree, slot_mask
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import Shape, check_width

if TYPE_CHECKING:
    from eagle3.models.draft import Draft, DraftOutput
    from eagle3.models.target import TargetOutput


class EagleDrafter:
    """Drafts from the target's hidden states (arXiv 2401.15077, 2406.16858 and 2503.01840).

    The draft pairs each token with the hidden state it was predicted from. Worked: the target has processed
    x0..x4 (states h0..h4) and chosen x5, the root. The draft's input is x1..x5 beside h0..h4 at positions
    0..4; its output at index 4 predicts x6, the first level of the tree. A node of level l then goes in at
    position 4 + l beside the draft's own output at its parent.

    Level 1 comes out of the pass over newly accepted tokens (`start`, `update`), each further level out of
    one forward over the nodes to expand. Their cache slots are given back when the tree is complete:
    accepted tokens go in again with the target's real states.
    """

    def __init__(self, draft: Draft, shape: Shape) -> None:
        """
        Raises:
            ValueError: if a node needs more children than the draft has tokens.
        """
        self.draft = draft
        self.shape = shape
        self.max_nodes = shape.max_nodes
        self._to_target: list[int] = draft.draft_to_target.tolist()
        check_width(shape, len(self._to_target))
        self._caches = ReusableCache(draft.new_cache, context=1 << 62)
        self._cache: KVCache
        self._root: int
        self._output: DraftOutput

    def start(
        self, prompt_ids: Sequence[int], token: int, output: TargetOutput, sampling: Sampling, slots: int
    ) -> None:
        """See `Drafter.start`. The draft tokens are the likeliest at every temperature."""
        self._cache = self._caches.reserve(slots + self.shape.max_expanded)
        self.update([*prompt_ids[1:], token], output)

    def update(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """See `Drafter.update`."""
        device = output.final.device
        first = self._cache.lengths[0]
        self._output = self.draft.forward(
            torch.tensor([list(tokens)], device=device),
            self.draft.fuse(output),
            torch.arange(first, first + len(tokens), device=device)[None],
            self._cache,
            logits="last",
        )
        self._root = tokens[-1]

    def propose(self) -> DraftTree:
        """See `Drafter.propose`."""
        growth = self.shape.grow(self._root)
        base = self._cache.lengths[0]
        slots: dict[int, list[int]] = {0: []}  # for each expanded node: its path's cache slots, from base
        logits, hidden = self._output.logits, self._output.hidden[:, -1:]
        position = base
        while True:
            assert logits is not None
            above = growth.frontier
            frontier = growth.extend(*self._children(logits[0]))
            if not frontier:
                break
            rows = [above.index(growth.parents[node]) for node in frontier]
            for node in frontier:
                slots[node] = [*slots[growth.parents[node]], len(slots) - 1]
            output = self.draft.forward(
                torch.tensor([[growth.tokens[node] for node in frontier]], device=hidden.device),
                _rows(hidden, rows),
                torch.full((1, len(frontier)), position, device=hidden.device),
                self._cache,
                self._mask([slots[node] for node in frontier], len(slots) - 1, hidden.device),
            )
            logits, hidden = output.logits, output.hidden
            position += 1
        self._cache.truncate(base)
        return growth.finish()

    def _children(self, logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest tokens (as target ids) and their log-probabilities for logits [T, Vd], best first."""
        log_probs, ids = logits.float().log_softmax(-1).topk(self.shape.width)  # [T, width]
        to_target = self._to_target
        return [[to_target[i] for i in row] for row in ids.tolist()], log_probs.tolist()

    @staticmethod
    def _mask(visible: Sequence[Sequence[int]], slots: int, device: torch.device) -> Tensor | None:
        """Bool [T, slots] over this round's slots, or None where a causal mask shows the same (a chain)."""
        if len(visible) == 1 and len(visible[0]) == slots:
            return None
        return slot_mask(visible, slots).to(device)


def _rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of hidden [1, T, H] as [1, len(rows), H], without a copy where possible."""
    if len(set(rows)) == 1:
        return hidden[:, rows[0] : rows[0] + 1].expand(-1, len(rows), -1)
    return hidden.index_select(1, torch.tensor(rows, device=hidden.device))
