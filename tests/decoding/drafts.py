"""Drafts for tests: random ones of the real architectures, scripted ones that are always right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.models.draft import Draft, DraftConfig, DraftOutput
from eagle3.models.eagle import EagleDraft, EagleModule
from eagle3.models.eagle3 import Eagle3Draft, Eagle3Module
from eagle3.models.target import Target, TargetOutput

Module = TypeVar("Module", bound=torch.nn.Module)


def random_draft(
    target: Target,
    family: str = "eagle3",
    draft_vocab_size: int | None = None,
    seed: int = 0,
    fused: bool = True,
) -> Draft:
    """An untrained draft, weights large enough that its opinions vary."""
    torch.manual_seed(seed)
    config = DraftConfig.for_target(target, family, draft_vocab_size=draft_vocab_size, fused=fused)
    if family == "eagle":
        return EagleDraft(_enlarged(EagleModule(config)), target)
    module = _enlarged(Eagle3Module(config))
    module.set_vocabulary(torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values)
    return Eagle3Draft(module, target)


def _enlarged(module: Module) -> Module:
    for parameter in module.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return module


class ScriptedDraft:
    """Knows the sequence that the target will produce, and predicts it, or anything but it."""

    family = "scripted"

    def __init__(self, target: Target, sequence: Sequence[int], right: bool) -> None:
        self.hidden_size = target.hidden_size
        self.draft_to_target = torch.arange(target.vocab_size)
        self._sequence = sequence
        self._right = right

    def fuse(self, output: TargetOutput) -> Tensor:
        return output.final

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        logits: str = "all",
    ) -> DraftOutput:
        count = token_ids.shape[1]
        assert hidden.shape == (1, count, self.hidden_size)
        empty = torch.zeros(1, 1, count, 1)
        cache.append(0, empty, empty)
        cache.advance(count)
        result = torch.zeros(1, count, len(self.draft_to_target))
        for i, position in enumerate(positions[0].tolist()):
            # Position p holds token p + 1 and predicts token p + 2.
            if position + 2 < len(self._sequence):
                result[0, i, self._sequence[position + 2]] = 9.0 if self._right else -9.0
        return DraftOutput(hidden, result[:, -1:] if logits == "last" else result)

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        return KVCache(1, batch, 1, capacity, 1, torch.float32, "cpu")
