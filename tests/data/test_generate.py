"""Batched answering: a row does not depend on its company, stops exactly, and brings its hidden states."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from eagle3.data.completion import PlannedPrompt
from eagle3.data.generate import Answered, Request, answer, complete, sample_rows
from eagle3.decoding.sampling import Sampling, probabilities
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target

EOS = frozenset(range(100, 140))
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=3)
LIMIT, LONGEST = 14, 60


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    """A target whose answers end at different times."""
    other = copy.copy(tiny_target)
    other.eos_token_ids = EOS
    return other


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(140, 320, (length,), generator=generator).tolist())


# Sixteen conversations of one to three turns, prompts of 3 to 12 tokens.
REQUESTS = [
    Request(f"id-{i}", tuple(prompt(3 + (5 * i + 3 * turn) % 10, 10 * i + turn) for turn in range(1 + i % 3)))
    for i in range(16)
]


def answered(
    target: Target,
    requests: list[Request] | Iterator[Request],
    sampling: Sampling = SAMPLED,
    batch_size: int = 5,
    max_new_tokens: int = LIMIT,
    max_length: int = LONGEST,
    capture: bool = True,
) -> dict[str, Answered]:
    found = list(answer(target, requests, sampling, batch_size, max_new_tokens, max_length, capture))
    assert len({row.id for row in found}) == len(found)
    return {row.id: row for row in found}


@pytest.fixture(scope="module")
def alone(target: Target) -> dict[str, Answered]:
    """Every conversation answered by itself."""
    return answered(target, REQUESTS, batch_size=1)


def assert_same(first: Answered, second: Answered) -> None:
    for name in ("id", "token_ids", "answer_spans", "finish_reason", "target_argmax"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.hidden is not None
    assert second.hidden is not None
    assert torch.equal(first.hidden, second.hidden)


# --- independence of the batch ---


def test_the_sample_has_every_kind_of_row(alone: dict[str, Answered]) -> None:
    """What the comparisons below rest on."""
    assert {row.finish_reason for row in alone.values()} == {"stop", "length"}
    assert {len(row.answer_spans) for row in alone.values()} == {1, 2, 3}
    lengths = {end - start for row in alone.values() for start, end in row.answer_spans}
    assert min(lengths) < 4
    assert max(lengths) == LIMIT


@pytest.mark.parametrize("batch_size", [2, 5, 16, 40])
def test_batch_size_does_not_change_a_row(
    target: Target, alone: dict[str, Answered], batch_size: int
) -> None:
    """Token ids, spans and, bit for bit, hidden states."""
    together = answered(target, REQUESTS, batch_size=batch_size)
    assert together.keys() == alone.keys()
    for row_id, row in together.items():
        assert_same(row, alone[row_id])


@pytest.mark.parametrize("seed", range(3))
def test_order_does_not_change_a_row(target: Target, alone: dict[str, Answered], seed: int) -> None:
    order = torch.randperm(len(REQUESTS), generator=torch.Generator().manual_seed(seed)).tolist()
    for row_id, row in answered(target, [REQUESTS[index] for index in order]).items():
        assert_same(row, alone[row_id])


def test_capturing_does_not_change_a_row(target: Target, alone: dict[str, Answered]) -> None:
    for row_id, row in answered(target, REQUESTS, capture=False).items():
        assert row.token_ids == alone[row_id].token_ids
        assert row.answer_spans == alone[row_id].answer_spans
        assert row.hidden is None
        assert row.target_argmax == ()


def test_id_and_seed_decide_what_is_sampled(tiny_target: Target) -> None:
    same = prompt(6, 0)
    rows = answered(tiny_target, [Request("a", (same,)), Request("b", (same,))], max_new_tokens=30)
    assert rows["a"].token_ids != rows["b"].token_ids
    again = answered(tiny_target, [Request("a", (same,))], max_new_tokens=30)
    assert again["a"].token_ids == rows["a"].token_ids
    other = answered(tiny_target, [Request("a", (same,))], Sampling(1.0, seed=4), max_new_tokens=30)
    assert other["a"].token_ids != rows["a"].token_ids


# --- what is answered ---


def test_greedy_answers_are_those_of_vanilla_decoding(target: Target) -> None:
    vanilla = VanillaDecoder(target)
    for row in answered(target, REQUESTS[::3], Sampling()).values():
        (first,) = REQUESTS[int(row.id[3:])].segments
        generation = vanilla.generate(first, LIMIT, Sampling())
        assert row.token_ids == (*first, *generation.token_ids)
        assert row.finish_reason == generation.finish_reason


def test_rows_are_prompt_answer_next_turn_answer(alone: dict[str, Answered]) -> None:
    """Everything between the spans is what was asked, token for token; nothing is tokenised again."""
    for request in REQUESTS:
        row, place = alone[request.id], 0
        for segment, (start, end) in zip(request.segments, row.answer_spans, strict=False):
            assert row.token_ids[place:start] == segment
            assert end > start
            place = end
        assert place == len(row.token_ids)


def test_answers_stop_exactly_at_eos_and_at_the_limit(alone: dict[str, Answered]) -> None:
    for row in alone.values():
        for number, (start, end) in enumerate(row.answer_spans):
            text = row.token_ids[start:end]
            last = number == len(row.answer_spans) - 1
            assert not EOS & set(text[:-1])
            assert len(text) <= LIMIT
            if text[-1] not in EOS:
                assert last
                assert row.finish_reason == "length"
                assert len(text) == LIMIT or len(row.token_ids) == LONGEST
            elif last:
                assert row.finish_reason == "stop"


def test_a_cut_off_answer_is_the_last_one(alone: dict[str, Answered]) -> None:
    """The next question would follow an answer without an end."""
    cut = [row for row in alone.values() if row.finish_reason == "length"]
    assert any(len(row.answer_spans) < len(REQUESTS[int(row.id[3:])].segments) for row in cut)


def always(target: Target, token: int) -> Target:
    """A target whose first choice after anything is `token`, an EOS."""
    other = copy.copy(target)
    other._lm_head = lambda x: torch.eye(320)[token].expand(*x.shape[:-1], 320) * 9
    return other


def test_an_eos_as_the_first_token_is_an_answer(target: Target) -> None:
    request = Request("a", (prompt(5, 0), prompt(3, 1)))
    row = answered(always(target, 100), [request], Sampling())["a"]
    assert row.token_ids == (*prompt(5, 0), 100, *prompt(3, 1), 100)
    assert row.answer_spans == ((5, 6), (9, 10))
    assert row.finish_reason == "stop"


def test_an_eos_on_the_last_place_is_a_stop(target: Target) -> None:
    row = answered(always(target, 100), [Request("a", (prompt(5, 0),))], Sampling(), max_new_tokens=1)["a"]
    assert row.finish_reason == "stop"
    row = answered(always(target, 100), [Request("a", (prompt(5, 0),))], Sampling(), max_length=6)["a"]
    assert (row.finish_reason, len(row.token_ids)) == ("stop", 6)


def test_the_longest_conversation_is_kept_to_exactly(target: Target) -> None:
    row = answered(
        always(target, 5), [Request("a", (prompt(5, 0),))], Sampling(), max_length=17, max_new_tokens=99
    )
    assert len(row["a"].token_ids) == 17
    assert row["a"].finish_reason == "length"


def test_a_next_turn_that_leaves_no_room_is_not_asked(target: Target) -> None:
    """Worked: 5 + 1 tokens, a turn of 3 and one token of answer need 10 places."""
    request = Request("a", (prompt(5, 0), prompt(3, 1)))
    row = answered(always(target, 100), [request], Sampling(), max_length=9)["a"]
    assert (len(row.token_ids), row.answer_spans, row.finish_reason) == (6, ((5, 6),), "stop")
    row = answered(always(target, 100), [request], Sampling(), max_length=10)["a"]
    assert (len(row.token_ids), row.answer_spans) == (10, ((5, 6), (9, 10)))


@pytest.mark.parametrize("length", [0, LONGEST, LONGEST + 5])
def test_a_prompt_that_leaves_no_room_is_refused(target: Target, length: int) -> None:
    with pytest.raises(
        ValueError, match=f"prompt 'long' has {length} tokens: 1 to 59 fit into max_length 60"
    ):
        answered(target, [Request("long", (prompt(length, 0),))])


def test_requests_are_read_as_rows_become_free(target: Target) -> None:
    taken: list[str] = []

    def requests() -> Iterator[Request]:
        for request in REQUESTS:
            taken.append(request.id)
            yield request

    stream = answer(target, requests(), SAMPLED, 4, LIMIT, LONGEST, capture=False)
    for finished, _ in enumerate(stream, start=1):
        assert len(taken) <= 4 + finished
    assert finished == len(taken) == len(REQUESTS)


# --- hidden states ---


def test_captured_states_are_those_of_one_plain_forward(target: Target, alone: dict[str, Answered]) -> None:
    """Bit for bit: training reads the same numbers whether they were captured or are computed again."""
    for row in alone.values():
        length = len(row.token_ids) - 1
        output = target.forward(
            torch.tensor([row.token_ids[:-1]]), torch.arange(length)[None], target.new_cache(length)
        )
        expected = torch.cat((output.captured, output.final), dim=-1)[0].to(torch.bfloat16)
        assert row.hidden is not None
        assert row.hidden.dtype == torch.bfloat16
        assert torch.equal(row.hidden, expected)
        assert output.logits is not None
        assert list(row.target_argmax) == output.logits[0].argmax(-1).tolist()


# --- sampling ---

KINDS = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(1.7),
    Sampling(1.0, top_k=5),
    Sampling(1.0, top_k=100),
    Sampling(1.0, top_k=2000),
    Sampling(1.0, top_p=0.5),
    Sampling(1.0, top_p=0.95),
    Sampling(1.3, top_p=0.9999),
    Sampling(0.8, top_k=90, top_p=0.9),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=1e-9),
]


@pytest.mark.parametrize("sampling", KINDS, ids=str)
@pytest.mark.parametrize(
    ("vocabulary", "spread"), [(7, 1.0), (320, 3.0), (320, 0.1), (9_000, 4.0), (9_000, 0.5)]
)
def test_tokens_follow_the_distribution(sampling: Sampling, vocabulary: int, spread: float) -> None:
    """Evenly spaced random numbers hit the likeliest n tokens as often as these add up to, for every n."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * spread
    expected = probabilities(logits, sampling).double()
    count = 150
    uniforms = [(index + 0.5) / count for index in range(count)]
    tokens = torch.tensor(sample_rows(logits.expand(count, -1), sampling, uniforms))
    found = torch.bincount(tokens, minlength=vocabulary).double()
    order = logits.argsort(descending=True)
    difference = found[order].cumsum(0) - count * expected[order].cumsum(0)
    assert difference.abs().max() < 0.6


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_a_row_is_sampled_as_if_it_were_alone(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 9_000, generator=generator) * torch.linspace(0.1, 6, 12)[:, None]
    uniforms = torch.rand(12, generator=generator, dtype=torch.float64).tolist()
    together = sample_rows(logits, sampling, uniforms)
    assert together == [sample_rows(logits[i : i + 1], sampling, uniforms[i : i + 1])[0] for i in range(12)]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_the_ends_of_the_random_numbers_are_tokens_of_the_nucleus(sampling: Sampling, uniform: float) -> None:
    logits = torch.randn(1, 9_000, generator=torch.Generator().manual_seed(2)) * 3
    (token,) = sample_rows(logits, sampling, [uniform])
    assert probabilities(logits[0], sampling)[token] > 0
    if uniform == 0:
        assert token == int(logits.argmax())


# --- self-made prompts ---


def test_complete_gives_the_text_without_its_eos(target: Target) -> None:
    planned = [PlannedPrompt(f"p-{i}", "test", "", prompt(4, i), "", None) for i in range(6)]
    found = {row.id: row for row in complete(target, planned, SAMPLED, batch_size=4, max_new_tokens=20)}
    assert found.keys() == {plan.id for plan in planned}
    rows = answered(
        target,
        [Request(plan.id, (tuple(plan.prefix_ids),)) for plan in planned],
        max_new_tokens=20,
        capture=False,
    )
    assert {row.finish_reason for row in found.values()} == {"stop", "length"}
    for row_id, row in found.items():
        ids = rows[row_id].token_ids[4:]
        kept = ids[:-1] if row.finish_reason == "stop" else ids
        assert row.text == target.tokenizer.decode(kept)


def test_a_cache_that_does_not_fit_is_refused_in_words(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(capacity: int, batch: int = 1) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tiny_target, "new_cache", full)
    with pytest.raises(ValueError, match=r"batch_size 3: .* 3 rows of 64 tokens .* lower batch_size"):
        list(answer(tiny_target, [], Sampling(), 3, 8, 64, False))
