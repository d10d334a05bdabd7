"""Simulated acceptance on validation rows: what a chain of drafts would be accepted to, without decoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eagle3.training.batches import Batch
from eagle3.training.objective import Objective
from eagle3.training.unroll import shift_left


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Acceptance of a greedy chain of drafts.

    conditional[i] is the share of accepted drafts at depth i among those whose earlier drafts were all
    accepted (n-alpha of the EAGLE papers); `length` is the mean acceptance length they imply, the bonus token
    included.
    """

    conditional: tuple[float, ...]
    length: float


def simulate_acceptance(objective: Objective, batches: Iterable[Batch], depth: int) -> SimulatedAcceptance:
    """Start a chain of `depth` drafts at every answer position of the validation rows.

    A draft is accepted when it is the target's argmax. The rows may be sampled: where a row's own token is
    not the target's argmax, the context of deeper drafts is no longer the one greedy decoding would have, and
    the chain is no longer counted.
    """
    accepted, tried = torch.zeros(depth), torch.zeros(depth)
    for batch in batches:
        alive = torch.ones_like(batch.answer_mask)
        positions = torch.arange(batch.token_ids.shape[1], device=alive.device)[None]
        for step, predicted in enumerate(objective.predictions(batch, depth)):
            judged = shift_left(batch.answer_mask, step + 2) & (positions + 2 + step < batch.lengths[:, None])
            goal = shift_left(batch.target_argmax, step + 1)
            alive = alive & judged
            tried[step] += int(alive.sum())
            alive = alive & (predicted == goal)
            accepted[step] += int(alive.sum())
            alive = alive & (shift_left(batch.token_ids, step + 2) == goal)
    conditional = (accepted / tried.clamp_min(1)).tolist()
    length, product = 1.0, 1.0
    for share in conditional:
        product *= share
        length += product
    return SimulatedAcceptance(tuple(conditional), length)
