"""The speculative engine: one cycle for every drafter, lossless by construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.decoding.cache import ReusableCache
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.generation import Answer, Generation, Round, check_request
from eagle3.decoding.sampling import Sampling, TokenChooser
from eagle3.decoding.vanilla import clock, context_length, prefill
from eagle3.decoding.verify import verify

if TYPE_CHECKING:
    from eagle3.models.target import Target, TargetOutput


class SpeculativeDecoder:
    """Decodes with a drafter whose proposals the target verifies, several tokens a target forward."""

    def __init__(self, target: Target, drafter: Drafter, name: str) -> None:
        self.name = name
        self.target = target
        self.drafter = drafter
        self._context = context_length(target)
        self._caches = ReusableCache(target.new_cache, self._context)
        self._now = clock(target.device)

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """See `Decoder.generate`."""
        target, drafter, now = self.target, self.drafter, self._now
        slots = check_request(prompt_ids, max_new_tokens, drafter.max_nodes, self._context)
        cache = self._caches.reserve(slots)
        choose = TokenChooser(sampling)
        answer = Answer(max_new_tokens, target.eos_token_ids)

        started = now()
        output = prefill(target, prompt_ids, cache)
        assert output.logits is not None
        tokens = [choose(output.logits[0, -1])]
        answer.extend(tokens)
        if not answer.finished:
            drafter.start(prompt_ids, tokens[0], output, sampling, slots)
        prefilled = now()

        rounds: list[Round] = []
        while not answer.finished:
            t0 = now()
            tree = drafter.propose()
            t1 = now()
            # The root is the last chosen token; its slot and position are the first free ones.
            base = cache.lengths[0]
            ids = torch.tensor([tree.tokens], device=target.device)
            positions = torch.tensor([[base + depth for depth in tree.depths]], device=target.device)
            mask = tree.mask()
            output = target.forward(
                ids, positions, cache, mask if mask is None else mask.to(target.device), logits="all"
            )
            assert output.logits is not None
            t2 = now()
            verdict = verify(tree, output.logits[0], choose)
            tokens = [*(tree.tokens[node] for node in verdict.path[1:]), verdict.bonus]
            produced = answer.extend(tokens)
            t3 = now()
            cache.compact(base, [base + node for node in verdict.path])
            t4 = now()
            if not answer.finished:
                drafter.update(tokens, at_nodes(output, verdict.path))
            t5 = now()
            rounds.append(
                Round(
                    nodes=len(tree.tokens),
                    depth=max(tree.depths),
                    accepted=len(tokens) - 1,
                    produced=produced,
                    draft_seconds=t1 - t0 + t5 - t4,
                    verify_seconds=t2 - t1,
                    accept_seconds=t3 - t2,
                    cache_seconds=t4 - t3,
                )
            )
        return Generation(
            tuple(answer.token_ids),
            answer.finish_reason or "",
            prefilled - started,
            now() - prefilled,
            tuple(rounds),
        )


def at_nodes(output: TargetOutput, path: Sequence[int]) -> TargetOutput:
    """The target's hidden states at the nodes of a path, [1, T, ...]; a slice where it is contiguous."""
    if path[-1] == len(path) - 1:
        return replace(
            output,
            logits=None,
            captured=output.captured[:, : len(path)],
            final=output.final[:, : len(path)],
        )
    nodes: Tensor = torch.tensor(path, device=output.final.device)
    return replace(
        output,
        logits=None,
        captured=output.captured.index_select(1, nodes),
        final=output.final.index_select(1, nodes),
    )
