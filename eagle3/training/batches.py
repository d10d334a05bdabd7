"""Batches of regenerated rows: bucketed by length, in an order fixed by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eagle3.data.hidden_states import RowStates
from eagle3.data.rows import Row


@dataclass(frozen=True)
class Batch:
    """B rows padded to T tokens. A row's last token has no hidden state: nothing follows it."""

    token_ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B]
    answer_mask: Tensor  # [B, T] bool: the target produced this token
    captured: Tensor  # [B, T, n H]: zeros at and beyond the last token
    final: Tensor  # [B, T, H]: lm_head of final[t] is the target's distribution of token t + 1
    target_argmax: Tensor  # [B, T] int64: the target's most likely token t + 1; -1 from the last token on

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.lengths.sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: str) -> list[list[int]]:
    """Group row indices into batches of at most `batch_tokens` padded tokens, similar lengths together.

    Every row is in exactly one batch. The order is shuffled and depends on the seed alone.
    """
    rng = random.Random(seed)
    # A little noise on the length varies the company of a row from epoch to epoch at almost no padding.
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index] * rng.uniform(0.9, 1.1), index))
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


def make_batch(rows: Sequence[Row], states: Callable[[Row], RowStates], hidden_size: int) -> Batch:
    """Pad rows and what the target makes of them into tensors; every row is asked for once."""
    longest = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    answer_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    target_argmax = torch.full((len(rows), longest), -1, dtype=torch.int64)
    hidden: Tensor | None = None
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[index, :length] = torch.tensor(row.token_ids)
        answer_mask[index, :length] = row.answer_mask()
        state = states(row)
        target_argmax[index, : length - 1] = state.target_argmax
        if hidden is None:
            hidden = torch.zeros(len(rows), longest, state.hidden.shape[1])
        hidden[index, : length - 1] = state.hidden
    assert hidden is not None
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    captured, final = hidden[..., :-hidden_size], hidden[..., -hidden_size:]
    return Batch(token_ids, lengths, answer_mask, captured, final, target_argmax)
