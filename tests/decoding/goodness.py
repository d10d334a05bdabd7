"""Goodness of fit of samples: the exact distribution of two new tokens, a test on it, bugs to plant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from eagle3.decoding import verify as verify_module
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.sampling import Sampling, probabilities
from eagle3.models.target import Target
from tests.decoding.test_verify import planted

Pairs = dict[tuple[int, ...], float]


@torch.inference_mode()
def exact_pairs(target: Target, prompt: Sequence[int], sampling: Sampling) -> Pairs:
    """The probability of each pair of second and third new tokens, by transformers' own forward.

    The first new token comes from the prefill, before anything is drafted; it is summed over.
    """

    def after(tokens: Sequence[int]) -> list[tuple[int, float]]:
        logits = target.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        found = probabilities(logits, sampling).double()
        return [(token, float(found[token])) for token in found.nonzero().flatten().tolist()]

    pairs: Pairs = {}
    for first, p_first in after([]):
        for second, p_second in after([first]):
            for third, p_third in after([first, second]):
                key = (second, third)
                pairs[key] = pairs.get(key, 0.0) + p_first * p_second * p_third
    total = sum(pairs.values())
    assert abs(total - 1) < 1e-4
    return {pair: share / total for pair, share in pairs.items()}


def p_value(
    decoder: SpeculativeDecoder, prompt: Sequence[int], pairs: Pairs, sampling: Sampling, samples: int
) -> float:
    """Of the chi-square test that second and third tokens follow `pairs`; with seeds 0 to samples - 1.

    Zero where a pair was sampled that cannot occur.
    """
    counts: Counter[tuple[int, ...]] = Counter(
        decoder.generate(prompt, 3, replace(sampling, seed=seed)).token_ids[1:] for seed in range(samples)
    )
    if not counts.keys() <= pairs.keys():
        return 0.0
    often = [pair for pair, share in pairs.items() if share * samples >= 5]
    observed = [counts[pair] for pair in often]
    expected = [pairs[pair] * samples for pair in often]
    rare = samples - sum(expected)
    if rare > 1e-6 * samples:  # the pairs that are seldom seen, together
        observed.append(samples - sum(observed))
        expected.append(rare)
    return float(chisquare(observed, expected).pvalue)


def plant(monkeypatch: pytest.MonkeyPatch, function: str, right: str, wrong: str, flat: Sampling) -> None:
    """Put a mutant of `verify.verify` or `verify.accept_chain` in its place; it may name `flat` as FLAT."""
    monkeypatch.setattr(verify_module, "FLAT", flat, raising=False)
    mutant = planted(getattr(verify_module, function), right, wrong)
    owner = "eagle3.decoding.engine.verify" if function == "verify" else "eagle3.decoding.verify.accept_chain"
    monkeypatch.setattr(owner, mutant)
