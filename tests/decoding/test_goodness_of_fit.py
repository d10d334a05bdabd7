"""Sampled tokens of a real (tiny) model follow its exact distribution: chi-square with fixed seeds.

The same test with a bug planted must reject, so the samples are enough to see one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3.decoding.drafter import Drafter
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.independent_drafter import IndependentDrafter
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import TreeShape
from eagle3.models.target import Target
from tests.decoding.drafts import random_draft
from tests.decoding.goodness import Pairs, exact_pairs, p_value, plant
from tests.tiny import tiny_llama

PROMPT = [3, 1, 4]
SAMPLES = 600
SAMPLING = Sampling(temperature=0.8, top_p=0.95)


def model(seed: int) -> Target:
    tokenizer = SimpleNamespace(eos_token_id=None, get_vocab=dict)
    llama = tiny_llama(8, hidden_size=16, layers=2, heads=2, kv_heads=1, seed=seed)
    result = Target(llama, tokenizer, capture_layers=(1, 2))
    result.eos_token_ids = frozenset()
    return result


@pytest.fixture(scope="module")
def target() -> Target:
    return model(0)


@pytest.fixture(scope="module")
def exact(target: Target) -> Pairs:
    return exact_pairs(target, PROMPT, SAMPLING)


def drafter(target: Target, name: str) -> Drafter:
    if name.startswith("independent"):
        return IndependentDrafter(model(1), target, num_steps=int(name[-1]))
    return EagleDrafter(random_draft(target), TreeShape(2, 2, 5))


def fit(target: Target, exact: Pairs, name: str) -> float:
    decoder = SpeculativeDecoder(target, drafter(target, name), name)
    return p_value(decoder, PROMPT, exact, SAMPLING, SAMPLES)


# With one drafted token the third token is often a bonus token, with two it comes out of a residual.
@pytest.mark.parametrize("name", ["independent-1", "independent-2", "eagle3"])
def test_samples_follow_the_targets_distribution(target: Target, exact: Pairs, name: str) -> None:
    assert fit(target, exact, name) > 1e-2


@pytest.mark.parametrize(
    ("name", "function", "right", "wrong"),
    [
        ("independent-2", "accept_chain", "(p - q).clamp_(min=0)", "p"),
        ("independent-1", "accept_chain", "target(len(drafted))", "target(0)"),
        ("eagle3", "verify", "choose(logits[node])", "TokenChooser(FLAT, choose.randomness)(logits[node])"),
    ],
    ids=["residual is p", "bonus of another node", "processing left out"],
)
def test_planted_bug_is_rejected(
    target: Target,
    exact: Pairs,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    function: str,
    right: str,
    wrong: str,
) -> None:
    plant(monkeypatch, function, right, wrong, flat=Sampling(temperature=1.2, top_p=0.95))
    assert fit(target, exact, name) < 1e-3
