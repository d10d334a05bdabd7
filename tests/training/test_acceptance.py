"""Simulated acceptance: known answers, and a loop that says in words what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from eagle3.models.target import Target
from eagle3.training.acceptance import simulate_acceptance
from eagle3.training.batches import Batch
from eagle3.training.objective import Eagle3Objective, LossTerms
from tests.models.drafts import random_eagle3
from tests.training.samples import eagle3_settings, sample_batch


class Scripted:
    """An objective that predicts what it is told, one tensor [B, T] a depth for each batch."""

    def __init__(self, *scripts: list[Tensor]) -> None:
        self.module = nn.Identity()
        self._scripts = iter(scripts)

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        raise NotImplementedError

    def predictions(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        script = next(self._scripts)
        assert len(script) == depth
        return iter(script)

    def finish(self) -> None:
        raise NotImplementedError


def batch_of(token_ids: list[int], argmax: list[int], answer: list[int]) -> Batch:
    """One row; argmax[t] is the target's choice for token t + 1."""
    length = len(token_ids)
    return Batch(
        token_ids=torch.tensor([token_ids]),
        lengths=torch.tensor([length]),
        answer_mask=torch.tensor([answer], dtype=torch.bool),
        captured=torch.zeros(1, length, 1),
        final=torch.zeros(1, length, 1),
        target_argmax=torch.tensor([[*argmax, -1]]),
    )


# x0 x1 | x2 x3 x4 x5: a greedy answer of four tokens.
GREEDY = batch_of([9, 9, 2, 3, 4, 5], [9, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1])
# At depth i position t drafts token t + 2 + i. These are all right.
RIGHT = [
    torch.tensor([[2, 3, 4, 5, 0, 0]]),
    torch.tensor([[3, 4, 5, 0, 0, 0]]),
    torch.tensor([[4, 5, 0, 0, 0, 0]]),
]


def test_a_draft_that_is_always_right() -> None:
    result = simulate_acceptance(Scripted(RIGHT), [GREEDY], 3)
    assert result.conditional == (1, 1, 1)
    assert result.length == 4  # three drafts and the bonus token


def test_a_draft_that_is_always_wrong() -> None:
    result = simulate_acceptance(Scripted([torch.full((1, 6), 7)] * 3), [GREEDY], 3)
    assert result.conditional == (0, 0, 0)
    assert result.length == 1


def test_conditional_acceptance_counts_chains_that_are_still_alive() -> None:
    """Worked: four chains start, at positions 0 to 3. At depth 0 chains 0, 1 and 3 are right: 3 of 4. Chain 3
    has no second token in the row, so two go on: chain 0 is right, chain 1 is not: 1 of 2. Chain 0 is right
    again: 1 of 1.
    """
    script = [torch.tensor([[2, 3, 7, 5, 0, 0]]), torch.tensor([[3, 7, 5, 0, 0, 0]]), RIGHT[2]]
    result = simulate_acceptance(Scripted(script), [GREEDY], 3)
    assert result.conditional == pytest.approx((3 / 4, 1 / 2, 1))
    assert result.length == pytest.approx(1 + 3 / 4 + 3 / 8 + 3 / 8)


def test_a_sampled_token_ends_a_chain_after_it_was_judged() -> None:
    """The row has 8 where the target's choice was 3: drafting 3 is right, but the row goes on from 8."""
    sampled = batch_of([9, 9, 2, 8, 4, 5], [9, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1])
    result = simulate_acceptance(Scripted(RIGHT), [sampled], 3)
    # Depth 0: chains 0..3 judged on tokens 2..5, all right. Chain 1 drafted the sampled place and ends.
    # Depth 1: chains 0 and 2 judged on tokens 3 and 5, both right; chain 0 reached the sampled place, ends.
    assert result.conditional == (1, 1, 0)
    assert result.length == 3


def test_prompt_tokens_are_not_judged() -> None:
    prompt = replace(GREEDY, answer_mask=torch.tensor([[0, 0, 0, 0, 1, 1]], dtype=torch.bool))
    wrong_on_the_prompt = [torch.tensor([[7, 7, 4, 5, 0, 0]]), torch.tensor([[7, 7, 5, 0, 0, 0]])]
    assert simulate_acceptance(Scripted(wrong_on_the_prompt), [prompt], 2).conditional == (1, 1)


def test_batches_are_weighed_by_their_positions() -> None:
    short = batch_of([9, 2], [2], [0, 1])  # too short to judge anything
    other = batch_of([9, 9, 2], [9, 2], [0, 0, 1])
    result = simulate_acceptance(
        Scripted([RIGHT[0]], [torch.tensor([[7, 7]])], [torch.tensor([[7, 0, 0]])]), [GREEDY, short, other], 1
    )
    assert result.conditional == pytest.approx((4 / 5,))


def loop(batch: Batch, predictions: list[Tensor]) -> tuple[list[int], list[int]]:
    """Accepted and tried drafts by depth."""
    accepted, tried = [0] * len(predictions), [0] * len(predictions)
    for row, length in enumerate(batch.lengths.tolist()):
        for start in range(length):
            for depth, predicted in enumerate(predictions):
                place = start + 2 + depth
                if place >= length or not batch.answer_mask[row, place]:
                    break
                tried[depth] += 1
                choice = batch.target_argmax[row, place - 1]
                if predicted[row, start] != choice:
                    break
                accepted[depth] += 1
                if batch.token_ids[row, place] != choice:
                    break
    return accepted, tried


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_loop_on_random_rows(seed: int) -> None:
    """Three tokens only, so that all cases occur."""
    torch.manual_seed(seed)
    shape, lengths = (300, 14), torch.randint(2, 15, (300,))
    inside = torch.arange(14)[None] < lengths[:, None]
    known = torch.arange(14)[None] < lengths[:, None] - 1
    batch = Batch(
        token_ids=torch.randint(0, 3, shape) * inside,
        lengths=lengths,
        answer_mask=(torch.rand(shape) < 0.8) & inside,
        captured=torch.zeros(*shape, 1),
        final=torch.zeros(*shape, 1),
        target_argmax=torch.where(known, torch.randint(0, 3, shape), -1),
    )
    predictions = [torch.randint(0, 3, shape) for _ in range(4)]
    accepted, tried = loop(batch, predictions)
    result = simulate_acceptance(Scripted(predictions), [batch], 4)
    expected = [right / max(all_, 1) for right, all_ in zip(accepted, tried, strict=True)]
    assert result.conditional == pytest.approx(expected)
    assert tried[0] > tried[1] > tried[2] > 0
    assert accepted[0] > accepted[1] > 0


def test_a_real_objective_is_judged_by_its_predictions(tiny_target: Target) -> None:
    module = random_eagle3(tiny_target, size=320)
    objective = Eagle3Objective(
        module, tiny_target.embed_weight, tiny_target.lm_head_weight, eagle3_settings(), 0.5, torch.ones(96)
    )
    batch = sample_batch(tiny_target)
    accepted, tried = loop(batch, list(objective.predictions(batch, 2)))
    result = simulate_acceptance(objective, [batch], 2)
    assert result.conditional[0] == pytest.approx(accepted[0] / tried[0])
