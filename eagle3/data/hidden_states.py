"""Hidden states computed by another forward of the target, for training without captured ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from eagle3.data.rows import Row
from eagle3.models.target import Target, TargetOutput


class OnlineStates:
    """Hidden states of a row as regeneration would have captured them, computed when they are asked for."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(self, row: Row) -> Tensor:
        """[T - 1, (n + 1) H] bfloat16: the captured layers, then the final state."""
        output = self._forward(row)
        return torch.cat((output.captured[0], output.final[0]), dim=-1).to(torch.bfloat16).cpu()

    def with_targets(self, rows: Iterable[Row]) -> list[Row]:
        """The rows with the target's most likely next tokens, which regeneration keeps if it captures."""
        return [
            row if row.target_argmax else replace(row, target_argmax=self._most_likely(row)) for row in rows
        ]

    def _most_likely(self, row: Row) -> tuple[int, ...]:
        with torch.inference_mode():
            logits = self._target.logits(self._forward(row).final)
        return tuple(logits[0].argmax(-1).tolist())

    def _forward(self, row: Row) -> TargetOutput:
        length = len(row.token_ids) - 1  # nothing follows the last token
        ids = torch.tensor([row.token_ids[:length]], device=self._target.device)  # [1, T - 1]
        positions = torch.arange(length, device=self._target.device)[None]
        with torch.inference_mode():
            return self._target.forward(ids, positions, self._target.new_cache(length), logits="none")
