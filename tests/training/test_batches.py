"""Batches: every row once, within the token limit, in an order that the seed fixes; silent padding."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.hidden_states import OnlineStates
from eagle3.data.rows import Row
from eagle3.models.target import Target
from eagle3.training.batches import make_batch, plan_batches
from tests.training.samples import exact_states, sample_rows


@given(st.lists(st.integers(2, 60), min_size=1, max_size=80), st.integers(60, 300), st.text(max_size=3))
def test_every_row_is_in_one_batch_within_the_limit(lengths: list[int], limit: int, seed: str) -> None:
    batches = plan_batches(lengths, limit, seed)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert max(lengths[index] for index in batch) * len(batch) <= limit


def test_a_row_longer_than_the_limit_has_a_batch_of_its_own() -> None:
    assert [0] in plan_batches([500, 10, 10], 100, "")


def test_the_seed_fixes_the_order_and_changes_it() -> None:
    lengths = [10 + index % 17 for index in range(60)]
    assert plan_batches(lengths, 100, "1:0") == plan_batches(lengths, 100, "1:0")
    assert plan_batches(lengths, 100, "1:0") != plan_batches(lengths, 100, "1:1")


def test_rows_of_similar_length_keep_company() -> None:
    """Padding costs as much as tokens: it stays a small share."""
    lengths = [8 + (index * 37) % 120 for index in range(200)]
    padded = sum(
        max(lengths[index] for index in batch) * len(batch) for batch in plan_batches(lengths, 1024, "s")
    )
    assert padded < 1.2 * sum(lengths)


def test_a_batch_holds_its_rows_and_zeros(tiny_target: Target) -> None:
    """A row of n tokens has states at 0..n-2, target_argmax -1 from n-1 on, and the mask of its spans."""
    rows = sample_rows(tiny_target, 5)
    batch = make_batch(rows, lambda row: exact_states(tiny_target, row), tiny_target.hidden_size)
    longest = max(len(row.token_ids) for row in rows)
    assert batch.token_ids.shape == batch.answer_mask.shape == batch.target_argmax.shape == (5, longest)
    assert batch.captured.shape == (5, longest, 96)
    assert batch.final.shape == (5, longest, 32)
    assert batch.tokens == sum(len(row.token_ids) for row in rows)
    for index, row in enumerate(rows):
        count = len(row.token_ids)
        states = exact_states(tiny_target, row).hidden
        assert batch.token_ids[index, :count].tolist() == list(row.token_ids)
        assert torch.equal(batch.captured[index, : count - 1], states[:, :96])
        assert torch.equal(batch.final[index, : count - 1], states[:, 96:])
        assert batch.target_argmax[index, : count - 1].tolist() == list(row.target_argmax)
        answered = {position for start, end in row.answer_spans for position in range(start, end)}
        assert set(batch.answer_mask[index].nonzero().flatten().tolist()) == answered
        for padding in (batch.token_ids, batch.answer_mask):
            assert not padding[index, count:].any()
        for padding in (batch.captured, batch.final):
            assert not padding[index, count - 1 :].any()
        assert (batch.target_argmax[index, count - 1 :] == -1).all()


def test_final_states_give_the_target_argmax(tiny_target: Target) -> None:
    """The alignment of states and goals: lm_head of final[t] has its maximum at target_argmax[t]."""
    rows = sample_rows(tiny_target, 5)
    batch = make_batch(rows, lambda row: exact_states(tiny_target, row), tiny_target.hidden_size)
    likely = (batch.final @ tiny_target.lm_head_weight.T).argmax(-1)
    known = batch.target_argmax >= 0
    assert torch.equal(likely[known], batch.target_argmax[known])


def test_rows_without_the_targets_choices_get_them_with_their_states(tiny_target: Target) -> None:
    """Of one forward a row, and equal to those that regeneration would have kept."""
    rows = sample_rows(tiny_target, 5)
    online, bare = OnlineStates(tiny_target), [replace(row, target_argmax=()) for row in rows]
    kept, computed = (make_batch(each, online, tiny_target.hidden_size) for each in (rows, bare))
    for field in fields(kept):
        assert torch.equal(getattr(kept, field.name), getattr(computed, field.name)), field.name


def test_rows_may_differ_from_the_targets_choice(tiny_target: Target) -> None:
    """The samples are not greedy text: otherwise the tests of acceptance would prove little."""
    row: Row
    for row in sample_rows(tiny_target, 3):
        assert list(row.token_ids[1:]) != list(row.target_argmax)
