"""Drafting trees for many rows at once with an EAGLE or EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache, ReusableCache
from eagle3.decoding.draft_tree import DraftTree, slot_mask
from eagle3.decoding.tree import Shape, check_width

if TYPE_CHECKING:
    from eagle3.models.draft import Draft
    from eagle3.models.target import TargetOutput

Children = tuple[list[list[int]], list[list[float]]]  # tokens and log-probabilities of each node's children


@dataclass
class _Row:
    """What the draft knows about a row before its next tree."""

    hidden: Tensor  # [H]: the draft's output at the last token
    children: Children  # of the root


class BatchEagleDrafter:
    """EagleDrafter over rows. The shape has to give every row's tree the same numbers of nodes.

    Rows take in different numbers of accepted tokens: shorter ones are padded behind their last token, where
    causal attention hides the padding, and its cache slots are given back.
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
        self._cache: KVCache
        self._rows: list[_Row] = []
        self._caches: ReusableCache | None = None
        self._batch = 0

    def reserve(self, slots: int, batch: int) -> None:
        """Make room for `batch` rows of up to `slots` tokens, a tree included, and forget all rows."""
        if self._caches is None or self._batch != batch:
            self._caches = ReusableCache(lambda size: self.draft.new_cache(size, batch), context=1 << 62)
            self._batch = batch
        # Padding takes as many slots as the longest accepted path.
        self._cache = self._caches.reserve(slots + max(self.shape.max_expanded, self.max_nodes))
        self._rows = []

    def start(self, index: int, prompt_ids: Sequence[int], token: int, output: TargetOutput) -> None:
        """Begin a sequence in the next free row; arguments as in `Drafter.start`."""
        assert index == len(self._rows)
        self._cache.lengths[index] = 0
        view = self._cache.rows(index, index + 1)
        device = output.final.device
        result = self.draft.forward(
            torch.tensor([[*prompt_ids[1:], token]], device=device),
            self.draft.fuse(output),
            torch.arange(len(prompt_ids), device=device)[None],
            view,
            logits="last",
        )
        self._cache.lengths[index] = view.lengths[0]
        assert result.logits is not None
        self._rows.append(_Row(result.hidden[0, -1], self._children(result.logits)[0]))

    def drop(self, index: int) -> None:
        """Forget a row; the last row takes its place."""
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last
            self._cache.copy_row(len(self._rows), index)

    def propose(self, roots: Sequence[int]) -> list[DraftTree]:
        """A tree below each row's last token; compare EagleDrafter.propose."""
        growths = [self.shape.grow(root) for root in roots]
        cache = self._active()
        bases = list(cache.lengths)
        slots: list[dict[int, list[int]]] = [{0: []} for _ in roots]
        hidden = torch.stack([row.hidden for row in self._rows])[:, None]  # [B, 1, H]
        children = [row.children for row in self._rows]
        level = 0
        while True:
            above = [growth.frontier for growth in growths]
            frontiers = [growth.extend(*each) for growth, each in zip(growths, children, strict=True)]
            assert len({len(frontier) for frontier in frontiers}) == 1, "the shape's trees differ in size"
            if not frontiers[0]:
                break
            parents: list[list[int]] = []
            visible: list[Tensor] = []
            for growth, frontier, before, known in zip(growths, frontiers, above, slots, strict=True):
                parents.append([before.index(growth.parents[node]) for node in frontier])
                for node in frontier:
                    known[node] = [*known[growth.parents[node]], len(known) - 1]
                visible.append(slot_mask([known[node] for node in frontier], len(known) - 1))
            device = hidden.device
            tokens = [[g.tokens[node] for node in f] for g, f in zip(growths, frontiers, strict=True)]
            positions = [[base + level] * len(frontiers[0]) for base in bases]
            result = self.draft.forward(
                torch.tensor(tokens, device=device),
                hidden.take_along_dim(torch.tensor(parents, device=device)[..., None], dim=1),
                torch.tensor(positions, device=device),
                cache,
                torch.stack(visible).to(device),
            )
            assert result.logits is not None
            hidden, children = result.hidden, self._children(result.logits)
            level += 1
        cache.truncate(bases)
        return [growth.finish() for growth in growths]

    def update(
        self, tokens: Sequence[Sequence[int]], output: TargetOutput, paths: Sequence[Sequence[int]]
    ) -> None:
        """Take in what verification decided in each row.

        Args:
            tokens: for each row, accepted drafted tokens, then the bonus token.
            output: the target's output at every node, [B, N, ...].
            paths: for each row, the accepted nodes from the root on, as many as it has tokens.
        """
        cache = self._active()
        bases = list(cache.lengths)
        longest = max(len(row) for row in tokens)
        device = output.final.device
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=device)
        nodes = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device)
        accepted = replace(
            output,
            logits=None,
            captured=output.captured.take_along_dim(nodes[..., None], dim=1),
            final=output.final.take_along_dim(nodes[..., None], dim=1),
        )
        positions = torch.tensor([[base + i for i in range(longest)] for base in bases], device=device)
        result = self.draft.forward(ids, self.draft.fuse(accepted), positions, cache)
        assert result.logits is not None
        last = torch.tensor([[len(row) - 1] for row in tokens], device=device)[..., None]  # [B, 1, 1]
        children = self._children(result.logits.take_along_dim(last, dim=1))
        hidden = result.hidden.take_along_dim(last, dim=1)
        self._rows = [_Row(hidden[index, 0], children[index]) for index in range(len(tokens))]
        cache.truncate([base + len(row) for base, row in zip(bases, tokens, strict=True)])
        self._cache.lengths[: len(tokens)] = cache.lengths

    def _active(self) -> KVCache:
        """The cache of the rows in use."""
        used = len(self._rows)
        return self._cache if used == self._cache.batch else self._cache.rows(0, used)

    def _children(self, logits: Tensor) -> list[Children]:
        """Each row's likeliest tokens and their log-probabilities for logits [B, T, Vd], best first."""
        log_probs, ids = logits.float().log_softmax(-1).topk(self.shape.width)  # [B, T, width]
        to_target = self._to_target
        return [
            ([[to_target[i] for i in node] for node in row], row_log_probs)
            for row, row_log_probs in zip(ids.tolist(), log_probs.tolist(), strict=True)
        ]
