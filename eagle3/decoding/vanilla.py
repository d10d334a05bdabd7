"""Ordinary decoding, one target forward a token: the reference for tokens and for time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from eagle3.decoding.cache import KVCache, ReusableCache
from eagle3.decoding.generation import Answer, Generation, check_request
from eagle3.decoding.sampling import Sampling, TokenChooser

if TYPE_CHECKING:
    from eagle3.models.target import Target, TargetOutput


class VanillaDecoder:
    """Decodes with the target alone, through the same forward and cache as every other method."""

    def __init__(self, target: Target, name: str = "vanilla") -> None:
        self.name = name
        self.target = target
        self._context = context_length(target)
        self._caches = ReusableCache(target.new_cache, self._context)
        self._now = clock(target.device)

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """See `Decoder.generate`."""
        cache = self._caches.reserve(check_request(prompt_ids, max_new_tokens, 0, self._context))
        choose = TokenChooser(sampling)
        answer = Answer(max_new_tokens, self.target.eos_token_ids)

        started = self._now()
        output = prefill(self.target, prompt_ids, cache)
        assert output.logits is not None
        token = choose(output.logits[0, -1])
        answer.extend([token])
        prefilled = self._now()
        while not answer.finished:
            ids = torch.tensor([[token]], device=self.target.device)
            positions = torch.tensor([[cache.lengths[0]]], device=self.target.device)
            output = self.target.forward(ids, positions, cache, logits="last")
            assert output.logits is not None
            token = choose(output.logits[0, -1])
            answer.extend([token])
        return Generation(
            tuple(answer.token_ids), answer.finish_reason or "", prefilled - started, self._now() - prefilled
        )


def prefill(target: Target, prompt_ids: Sequence[int], cache: KVCache) -> TargetOutput:
    """The target's forward over a prompt, logits [1, 1, V] at its last token only."""
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    positions = torch.arange(len(prompt_ids), device=target.device)[None]
    return target.forward(ids, positions, cache, logits="last")


def context_length(target: Target) -> int:
    """Positions that the target supports."""
    return int(target.config.max_position_embeddings)


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds, after the work queued on the device is done."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
