"""Batched decoding: each row gives the tokens it gives alone, whenever rows start and finish."""

from __future__ import annotations

import copy

import pytest

from eagle3.decoding.batch import BatchDecoder
from eagle3.decoding.batch_drafter import BatchEagleDrafter
from eagle3.decoding.copies import CopiesDecoder
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.generation import Decoder
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import EAGLE_TREE, Shape, TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target
from tests.decoding.drafts import random_draft

PROMPTS = [[5, 17, 60, 3], [7], [5, 6] * 20, [9, 8, 7, 6, 5, 4, 3], [100, 200], [31, 32, 33, 34, 35]]
LIMIT = 24
SAMPLINGS = [Sampling(temperature=0.0 if i % 2 else 0.8, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    """A target whose answers end at different times."""
    unstopped = copy.copy(tiny_target)
    unstopped.eos_token_ids = frozenset()
    vanilla = VanillaDecoder(unstopped)
    answers = [vanilla.generate(p, LIMIT, s).token_ids for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    result = copy.copy(tiny_target)
    result.eos_token_ids = frozenset({answers[0][3], answers[2][9], answers[3][0], answers[5][15]})
    return result


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_vanilla_rows_equal_batch_size_one(target: Target, batch_size: int) -> None:
    vanilla = VanillaDecoder(target)
    expected = [vanilla.generate(p, LIMIT, s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert len({len(generation.token_ids) for generation in expected}) > 2
    batch = BatchDecoder(target, "vanilla", batch_size).generate(PROMPTS, LIMIT, SAMPLINGS)
    for answer, generation in zip(batch.answers, expected, strict=True):
        assert answer.token_ids == generation.token_ids
        assert answer.finish_reason == generation.finish_reason
        assert answer.acceptance_lengths == (1,) * (len(answer.token_ids) - 1)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(
    "shape",
    [TreeShape.chain(3), TreeShape(3, 3, 14), TreeShape(1, 4, 5), EAGLE_TREE],
    ids=["chain", "dynamic", "one level", "static"],
)
@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_speculative_rows_equal_batch_size_one(
    target: Target, family: str, shape: Shape, batch_size: int
) -> None:
    draft = random_draft(target, family, seed=2)
    single = SpeculativeDecoder(target, EagleDrafter(draft, shape), family)
    decoder = BatchDecoder(target, family, batch_size, BatchEagleDrafter(draft, shape))
    batch = decoder.generate(PROMPTS, LIMIT, SAMPLINGS)
    for prompt, sampling, answer in zip(PROMPTS, SAMPLINGS, batch.answers, strict=True):
        generation = single.generate(prompt, LIMIT, sampling)
        assert answer.token_ids == generation.token_ids
        assert answer.finish_reason == generation.finish_reason
        assert answer.acceptance_lengths == generation.acceptance_lengths, "the same trees were drafted"


@pytest.mark.parametrize(
    "shape", [None, TreeShape.chain(3), TreeShape(3, 3, 14), TreeShape(3, 3, 14, confidence=0.004)], ids=str
)
def test_copies_of_a_prompt_are_the_prompt_alone(target: Target, shape: TreeShape | None) -> None:
    """So that a sweep of batches pairs by prompt, and only the times are the batch's."""
    draft = random_draft(target, seed=2)
    single: Decoder = VanillaDecoder(target)
    if shape is not None:
        single = SpeculativeDecoder(target, EagleDrafter(draft, shape), "single")
    drafter = None if shape is None else BatchEagleDrafter(draft, shape)
    copies = CopiesDecoder(BatchDecoder(target, "copies", 3, drafter), shape.num_steps if shape else 0)
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        mine, alone = (decoder.generate(prompt, LIMIT, sampling) for decoder in (copies, single))
        assert mine.token_ids == alone.token_ids
        assert mine.finish_reason == alone.finish_reason
        assert mine.acceptance_lengths == alone.acceptance_lengths
        assert bool(mine.rounds) == (shape is not None and len(mine.token_ids) > 1)
        parts = mine.draft_seconds + mine.verify_seconds + mine.accept_seconds
        assert not mine.rounds or parts == pytest.approx(mine.decode_seconds)


def test_a_batch_decoder_keeps_nothing_from_one_call_to_the_next(target: Target) -> None:
    decoder = BatchDecoder(
        target, "eagle3", 3, BatchEagleDrafter(random_draft(target, seed=2), TreeShape(3, 3, 14))
    )
    first = decoder.generate(PROMPTS, LIMIT, SAMPLINGS)
    decoder.generate(PROMPTS[:1], 5, SAMPLINGS[:1])
    assert decoder.generate(PROMPTS, LIMIT, SAMPLINGS).answers == first.answers
    assert first.decode_seconds >= first.draft_seconds + first.verify_seconds > 0


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[3], []], 2, "prompt is empty"),
        ([[3]], 2, "1 prompts and 2 samplings"),
        ([], 0, "0 prompts"),
        ([[3], [3] * 600], 2, "the request needs"),
    ],
)
def test_bad_batches_are_refused(target: Target, prompts: list[list[int]], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchDecoder(target, "vanilla", 2).generate(prompts, 5, [Sampling()] * count)


def test_batch_size_zero_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="batch_size = 0"):
        BatchDecoder(target, "vanilla", 0)
