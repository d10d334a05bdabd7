"""Hidden states computed by another forward of the target, for training without captured ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.data.rows import Row
from eagle3.models.target import Target, TargetOutput


class RowStates(NamedTuple):
    """What the target makes of a row: the states that a draft reads, and the choices it is judged by."""

    hidden: Tensor  # [T - 1, (n + 1) H]: the captured layers, then the final state
    target_argmax: Tensor  # [T - 1] int64: the most likely next tokens


class OnlineStates:
    """Hidden states of a row as regeneration would have captured them, computed when they are asked for."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(self, row: Row) -> RowStates:
        """The states in bfloat16, and the most likely next tokens where regeneration has not kept them."""
        output = self._forward(row)
        hidden = torch.cat((output.captured[0], output.final[0]), dim=-1).to(torch.bfloat16).cpu()
        if row.target_argmax:
            return RowStates(hidden, torch.tensor(row.target_argmax))
        with torch.inference_mode():
            return RowStates(hidden, self._target.logits(output.final)[0].argmax(-1).cpu())

    def _forward(self, row: Row) -> TargetOutput:
        length = len(row.token_ids) - 1  # nothing follows the last token
        ids = torch.tensor([row.token_ids[:length]], device=self._target.device)  # [1, T - 1]
        positions = torch.arange(length, device=self._target.device)[None]
        with torch.inference_mode():
            return self._target.forward(ids, positions, self._target.new_cache(length), logits="none")
