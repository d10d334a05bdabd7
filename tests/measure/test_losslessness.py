"""A wrong token must be called a failure and a tie must not, or losslessness is claimed of anything."""

import pytest
import torch

from eagle3.decoding.sampling import Sampling
from eagle3.measure.losslessness import (
    Comparison,
    Outcome,
    compare_outputs,
    count_outcomes,
    first_divergence,
    target_rescorer,
    tie_tolerance,
    worst,
)
from eagle3.models.target import Target
from tests.measure.fakes import VOCABULARY, continuation, fake_rescore, next_token

PROMPT = [3, 1, 4]
VANILLA = continuation(PROMPT, 8)


def _diverging(index: int, offset: int, then: str = "greedy") -> tuple[int, ...]:
    """Vanilla's tokens to `index`, another token there, then the target's own or a wrong continuation."""
    tokens = list(VANILLA[:index])
    tokens.append((VANILLA[index] + offset) % VOCABULARY)
    while len(tokens) < len(VANILLA):
        best = next_token([*PROMPT, *tokens])
        tokens.append(best if then == "greedy" else (best + 5) % VOCABULARY)
    return tuple(tokens)


def test_equal_tokens_are_exact_and_cost_no_forward() -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("rescored although equal")

    assert compare_outputs(PROMPT, VANILLA, VANILLA, 0.5, refuse).outcome is Outcome.EXACT


@pytest.mark.parametrize("index", [0, 3, 7])
def test_a_near_tie_is_accepted_where_the_logits_are_close(index: int) -> None:
    # The fake target scores the best token 10 and the next id 9.9.
    result = compare_outputs(PROMPT, VANILLA, _diverging(index, 1), 0.5, fake_rescore)
    assert result.outcome is Outcome.NEAR_TIE
    assert result.divergence is not None
    assert result.divergence.index == index
    assert result.divergence.gap == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize("index", [0, 3, 7])
def test_a_planted_wrong_token_is_a_failure(index: int) -> None:
    result = compare_outputs(PROMPT, VANILLA, _diverging(index, 2), 0.5, fake_rescore)
    assert result.outcome is Outcome.FAILURE
    assert result.divergence is not None
    assert result.divergence.gap == pytest.approx(10.0)


def test_the_same_tie_is_a_failure_below_its_gap_and_in_float32() -> None:
    assert compare_outputs(PROMPT, VANILLA, _diverging(3, 1), 0.05, fake_rescore).outcome is Outcome.FAILURE
    strict = tie_tolerance("float32")
    assert compare_outputs(PROMPT, VANILLA, _diverging(3, 1), strict, fake_rescore).outcome is Outcome.FAILURE


def test_a_tie_does_not_excuse_what_follows_it() -> None:
    wrong = _diverging(3, 1, then="wrong")
    assert compare_outputs(PROMPT, VANILLA, wrong, 0.5, fake_rescore).outcome is Outcome.FAILURE


@pytest.mark.parametrize("method", [VANILLA[:-1], (*VANILLA, 5), ()])
def test_stopping_early_or_late_is_a_failure(method: tuple[int, ...]) -> None:
    assert compare_outputs(PROMPT, VANILLA, method, 0.5, fake_rescore).outcome is Outcome.FAILURE


def test_a_logit_that_is_not_a_number_is_a_failure() -> None:
    result = compare_outputs(
        PROMPT, VANILLA, _diverging(3, 1), 0.5, lambda ids, start: fake_rescore(ids, start) * float("nan")
    )
    assert result.outcome is Outcome.FAILURE


def test_first_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2


def test_counts_and_the_worst_repeat() -> None:
    counts = count_outcomes([Outcome.EXACT, Outcome.EXACT, Outcome.NEAR_TIE, Outcome.FAILURE])
    assert counts.as_dict() == {"compared": 4, "exact": 2, "near_ties": 1, "failures": 1}
    repeats = [Comparison(outcome) for outcome in (Outcome.EXACT, Outcome.FAILURE, Outcome.NEAR_TIE)]
    assert worst(repeats).outcome is Outcome.FAILURE


def test_a_dtype_without_a_tolerance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int8.*near-tie tolerance"):
        tie_tolerance("int8")


def test_rescoring_a_real_target_gives_the_logits_of_each_prefix(tiny_target: Target) -> None:
    ids = [5, 9, 13, 21, 34]
    rows = target_rescorer(tiny_target)(ids, 2)
    assert rows.shape == (3, tiny_target.vocab_size)
    for row, length in enumerate((3, 4, 5)):  # row 0 scores the token after ids[:3]
        prefix = torch.tensor([ids[:length]])
        cache = tiny_target.new_cache(length)
        with torch.inference_mode():
            logits = tiny_target.forward(prefix, torch.arange(length)[None], cache, logits="last").logits
        assert logits is not None
        torch.testing.assert_close(rows[row], logits[0, 0], atol=1e-4, rtol=1e-4)


def test_sampling_default_is_greedy() -> None:
    # The comparison is defined for greedy outputs alone; the evaluation relies on this default.
    assert Sampling().greedy
