"""Many prompts at once, vanilla or speculative: rows that start and finish at different times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.decoding.batch_drafter import BatchEagleDrafter
from eagle3.decoding.cache import KVCache, ReusableCache
from eagle3.decoding.draft_tree import DraftTree, ancestor_mask
from eagle3.decoding.generation import Answer, check_request
from eagle3.decoding.sampling import Sampling, TokenChooser
from eagle3.decoding.vanilla import clock, context_length, prefill
from eagle3.decoding.verify import verify

if TYPE_CHECKING:
    from eagle3.models.target import Target


@dataclass(frozen=True)
class BatchAnswer:
    """One prompt's answer."""

    token_ids: tuple[int, ...]  # new tokens only, EOS included
    finish_reason: str  # "stop" | "length"
    acceptance_lengths: tuple[int, ...]  # as in Generation; of vanilla decoding all 1


@dataclass(frozen=True)
class BatchGeneration:
    """The answers in the order of the prompts, and where the time went, in seconds."""

    answers: tuple[BatchAnswer, ...]
    prefill_seconds: float  # every prompt through target and draft, one by one
    decode_seconds: float  # the rounds
    draft_seconds: float
    verify_seconds: float


@dataclass
class _Row:
    """A prompt being answered."""

    prompt: int
    choose: TokenChooser
    answer: Answer
    root: int = -1  # the last chosen token, not yet processed by the target
    acceptance_lengths: list[int] = field(default_factory=list)


class BatchDecoder:
    """Decodes up to `batch_size` prompts together and refills a row as soon as its answer ends.

    The cycle is the one of SpeculativeDecoder over rows; without a drafter every tree is its root, which is
    vanilla decoding. Each row has its own random numbers, so that its tokens are those of batch size 1.
    """

    def __init__(
        self, target: Target, name: str, batch_size: int, drafter: BatchEagleDrafter | None = None
    ) -> None:
        """
        Raises:
            ValueError: for a batch size below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: must be at least 1")
        self.name = name
        self.target = target
        self.batch_size = batch_size
        self.drafter = drafter
        self._context = context_length(target)
        self._caches = ReusableCache(lambda slots: target.new_cache(slots, batch_size), self._context)
        self._now = clock(target.device)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, samplings: Sequence[Sampling]
    ) -> BatchGeneration:
        """Answer every prompt, each with its own sampling.

        Raises:
            ValueError: before anything runs, if a request is empty or does not fit.
        """
        if len(prompts) != len(samplings) or not prompts:
            raise ValueError(
                f"{len(prompts)} prompts and {len(samplings)} samplings: give at least one prompt, and as "
                "many samplings"
            )
        nodes = 1 if self.drafter is None else self.drafter.max_nodes
        slots = max(check_request(prompt, max_new_tokens, nodes, self._context) for prompt in prompts)
        cache = self._caches.reserve(slots)
        if self.drafter is not None:
            self.drafter.reserve(slots, self.batch_size)
        waiting = deque(range(len(prompts)))
        rows: list[_Row] = []
        done: dict[int, BatchAnswer] = {}
        now = self._now
        prefill_seconds = decode_seconds = draft_seconds = verify_seconds = 0.0

        while waiting or rows:
            t0 = now()
            while waiting and len(rows) < self.batch_size:
                prompt = waiting.popleft()
                row = _Row(
                    prompt,
                    TokenChooser(samplings[prompt]),
                    Answer(max_new_tokens, self.target.eos_token_ids),
                )
                self._start(row, cache, len(rows), prompts[prompt])
                if row.answer.finished:
                    done[prompt] = _answered(row)
                else:
                    rows.append(row)
            t1 = now()
            prefill_seconds += t1 - t0
            if not rows:
                break
            roots = [row.root for row in rows]
            trees = (
                [DraftTree.chain([root]) for root in roots]
                if self.drafter is None
                else self.drafter.propose(roots)
            )
            t2 = now()
            active = cache if len(rows) == cache.batch else cache.rows(0, len(rows))
            bases = list(active.lengths)
            output = self.target.forward(*self._inputs(trees, bases), active, self._mask(trees))
            assert output.logits is not None
            t3 = now()
            verdicts = [
                verify(tree, output.logits[index], row.choose)
                for index, (tree, row) in enumerate(zip(trees, rows, strict=True))
            ]
            tokens = [
                [*(tree.tokens[node] for node in verdict.path[1:]), verdict.bonus]
                for tree, verdict in zip(trees, verdicts, strict=True)
            ]
            for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
                active.compact(bases[index], [bases[index] + node for node in verdict.path], index)
                row.acceptance_lengths.append(row.answer.extend(tokens[index]))
                row.root = tokens[index][-1]
            cache.lengths[: len(rows)] = active.lengths
            t4 = now()
            if self.drafter is not None:
                self.drafter.update(tokens, output, [verdict.path for verdict in verdicts])
            t5 = now()
            for index in reversed(range(len(rows))):  # backwards: a finished row is replaced by the last one
                if rows[index].answer.finished:
                    done[rows[index].prompt] = _answered(rows[index])
                    last = rows.pop()
                    if index < len(rows):
                        rows[index] = last
                        cache.copy_row(len(rows), index)
                    if self.drafter is not None:
                        self.drafter.drop(index)
            draft_seconds += t2 - t1 + t5 - t4
            verify_seconds += t3 - t2
            decode_seconds += now() - t1

        answers = tuple(done[prompt] for prompt in range(len(prompts)))
        return BatchGeneration(answers, prefill_seconds, decode_seconds, draft_seconds, verify_seconds)

    def _start(self, row: _Row, cache: KVCache, index: int, prompt_ids: Sequence[int]) -> None:
        """Run a prompt by itself into free row `index` of the cache and choose its first token."""
        cache.lengths[index] = 0
        view = cache.rows(index, index + 1)
        output = prefill(self.target, prompt_ids, view)
        cache.lengths[index] = view.lengths[0]
        assert output.logits is not None
        row.root = row.choose(output.logits[0, -1])
        row.answer.extend([row.root])
        if self.drafter is not None and not row.answer.finished:
            self.drafter.start(index, prompt_ids, row.root, output)

    def _inputs(self, trees: Sequence[DraftTree], bases: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids and positions, [B, N] each."""
        ids = torch.tensor([tree.tokens for tree in trees], device=self.target.device)
        positions = [[base + depth for depth in tree.depths] for tree, base in zip(trees, bases, strict=True)]
        return ids, torch.tensor(positions, device=self.target.device)

    def _mask(self, trees: Sequence[DraftTree]) -> Tensor | None:
        """Which node sees which in each row, bool [B, N, N]; None if all are chains."""
        if all(tree.is_chain for tree in trees):
            return None
        return torch.stack([ancestor_mask(tree.parents) for tree in trees]).to(self.target.device)


def _answered(row: _Row) -> BatchAnswer:
    assert row.answer.finish_reason is not None
    return BatchAnswer(tuple(row.answer.token_ids), row.answer.finish_reason, tuple(row.acceptance_lengths))
