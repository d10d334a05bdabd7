"""Temperature, top-k and top-p equal transformers' processors; draws follow the probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle3.decoding.sampling import Randomness, Sampling, TokenChooser, argmax, probabilities


@given(
    st.integers(0, 10**6),
    st.floats(0.2, 3.0),
    st.sampled_from([0, 1, 3, 50, 900, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.05]),
)
@settings(max_examples=80, deadline=None)
def test_probabilities_equal_transformers(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = 2 * torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    expected = processors(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(0)
    got = probabilities(logits, Sampling(temperature, top_k, top_p))
    assert got.sum().item() == pytest.approx(1, abs=1e-5)
    differing = (got - expected).abs() > 1e-6
    # The two sum in different orders: at most the token on the edge of the nucleus may differ.
    if differing.any():
        assert ((got > 0) ^ (expected > 0)).sum() == 1
        assert got[(got > 0) ^ (expected > 0)].item() + expected[(got > 0) ^ (expected > 0)].item() < 1e-2


def test_nucleus_wider_than_the_first_partial_sort() -> None:
    got = probabilities(torch.zeros(5000), Sampling(temperature=1.0, top_p=0.9))
    assert int((got > 0).sum()) in (4500, 4501)
    assert got.sum().item() == pytest.approx(1, abs=1e-4)


def test_tiny_nucleus_keeps_one_token() -> None:
    got = probabilities(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature=1.0, top_p=1e-6))
    assert got.tolist() == [0, 1, 0]


def test_tokens_tied_with_the_kth_are_kept() -> None:
    got = probabilities(torch.tensor([1.0, 1.0, 2.0, 0.0]), Sampling(temperature=1.0, top_k=2))
    assert (got > 0).tolist() == [True, True, True, False]


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])  # not normalised, zeros at both ends
    randomness = Randomness(0)
    draws = [randomness.draw(weights) for _ in range(4000)]
    assert set(draws) == {1, 3}
    # 4000 draws with p = 3/4: standard deviation 0.0068.
    assert draws.count(1) / len(draws) == pytest.approx(0.75, abs=5 * 0.0068)


@pytest.mark.parametrize("point", [0.0, 0.5, 1 - 2**-53])
def test_extreme_random_numbers_draw_possible_tokens(point: float, monkeypatch: pytest.MonkeyPatch) -> None:
    randomness = Randomness(0)
    monkeypatch.setattr(randomness, "_random", type("Fixed", (), {"random": lambda self: point})())
    assert randomness.draw(torch.tensor([0.0, 1.0, 0.0])) == 1
    assert randomness.draw(torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0])) in (1, 2, 3)


def test_streams_and_seeds() -> None:
    def numbers(randomness: Randomness) -> list[bool]:
        return [randomness.accept(0.5) for _ in range(64)]

    assert numbers(Randomness(3)) == numbers(Randomness(3))
    assert numbers(Randomness(3)) != numbers(Randomness(4))
    assert numbers(Randomness(3)) != numbers(Randomness(3, stream="draft"))


def test_argmax_takes_the_first_of_equal_maxima() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert argmax(torch.tensor([0.0, 2.0, 1.0, 2.0], dtype=dtype)) == 1


def test_one_random_number_a_token() -> None:
    # Decoders that choose token by token then draw equal tokens from equal seeds, whatever they draft.
    choose, reference = TokenChooser(Sampling(temperature=1.0, seed=5)), Randomness(5)
    for i in range(20):
        logits = torch.randn(10, generator=torch.Generator().manual_seed(i))
        assert choose(logits) == reference.draw(logits.softmax(0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_bad_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]
