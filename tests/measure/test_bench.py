"""The bench: every kind of method in params.yaml becomes a decoder, and drafts are loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from eagle3.config import MethodSettings
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.measure.bench import Bench, describe_drafting, rivals
from eagle3.measure.rendering import Prompt
from eagle3.measure.settings import EvaluationSettings
from eagle3.models.checkpoint import save_draft
from eagle3.models.independent import IndependentModule, save_independent
from eagle3.models.target import Target
from tests.models.drafts import random_eagle, random_eagle3

TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
METHODS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "speculative-sampling": ({"drafter": "model", "draft": "small", "num_steps": 2}, {"num_steps": 2}),
    "prompt-lookup": (
        {"drafter": "prompt-lookup", "num_steps": 4, "min_ngram": 1, "max_ngram": 3},
        {"num_steps": 4},
    ),
    "eagle": (
        {"drafter": "static-head", "draft": "eagle", "paths": None, "backend": "kernels"},
        {"static_nodes": 26},
    ),
    "eagle2": ({"drafter": "head", "draft": "eagle", "tree": TREE, "backend": "kernels"}, TREE),
    "eagle3": ({"drafter": "head", "draft": "eagle3", "tree": TREE, "backend": "kernels"}, TREE),
    "eagle3-torch": ({"drafter": "head", "draft": "eagle3", "tree": TREE, "backend": "torch"}, TREE),
    "eagle3-adaptive": (
        {"drafter": "adaptive-head", "draft": "eagle3", "tree": TREE},
        {**TREE, "adaptive": 1},
    ),
    "eagle3-lookup": (
        {
            "drafter": "hybrid",
            "draft": "eagle3",
            "tree": TREE,
            "adaptive": False,
            "num_steps": 4,
            "min_ngram": 2,
            "max_ngram": 3,
        },
        {**TREE, "copied": 4},
    ),
    "eagle3-adaptive-lookup": (
        {
            "drafter": "hybrid",
            "draft": "eagle3",
            "tree": TREE,
            "adaptive": True,
            "num_steps": 4,
            "min_ngram": 2,
            "max_ngram": 3,
        },
        {**TREE, "adaptive": 1, "copied": 4},
    ),
}


@pytest.fixture(scope="module")
def bench(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("drafts")
    save_draft(folder / "eagle", random_eagle(tiny_target), tiny_target, {})
    save_draft(folder / "eagle3", random_eagle3(tiny_target), tiny_target, {})
    save_independent(folder / "small", IndependentModule(tiny_target, (0, 7)), tiny_target, {})
    return Bench(tiny_target, folder, torch.float32)


def method(name: str, values: dict[str, Any]) -> MethodSettings:
    parsed: MethodSettings = TypeAdapter(MethodSettings).validate_python({"name": name, **values})
    return parsed


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=5)], ids=["greedy", "sampled"])
def test_every_method_decodes_what_vanilla_does(bench: Bench, name: str, sampling: Sampling) -> None:
    values, drafting = METHODS[name]
    decoder = bench.decoder(method(name, values))
    assert decoder.name == name
    assert describe_drafting(method(name, values)) == drafting
    expected = VanillaDecoder(bench.target).generate([5, 17, 60] * 5, 20, sampling)
    generation = decoder.generate([5, 17, 60] * 5, 20, sampling)
    if sampling.greedy or name != "speculative-sampling":
        # An independent model draws its own random numbers: equal in distribution, not token by token.
        assert generation.token_ids == expected.token_ids
    assert len(generation.rounds) > 0
    if "adaptive" in drafting:
        assert name in bench.costs
        assert len(bench.costs[name]["verify"]) == TREE["num_draft_tokens"]


def test_a_draft_is_loaded_once(bench: Bench) -> None:
    assert bench.head("eagle3") is bench.head("eagle3")
    assert bench.head("eagle3") is not bench.head("eagle3", torch.bfloat16)


def test_the_aa_arm_has_a_cache_of_its_own(bench: Bench, tmp_path: Path) -> None:
    """One decoder under two names would share what the place of its cache does to the time."""
    report = bench.evaluate(
        [bench.vanilla(), bench.decoder(method("prompt-lookup", METHODS["prompt-lookup"][0]))],
        [Prompt("chat", "1", ("Why is the sky blue?",))],
        EvaluationSettings(max_new_tokens=4, dtype="float32", repeats=1),
        machine={},
        subject={},
        reports=tmp_path,
        journal=tmp_path / "journal.jsonl",
        progress=False,
    )
    assert set(report["settings"]["warm_up"]) == {"vanilla", "vanilla-aa", "prompt-lookup"}


def test_methods_are_paired_with_what_they_have_to_win_against(bench: Bench) -> None:
    chain = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}
    methods = [
        *(method(name, values) for name, (values, _) in METHODS.items()),
        method("eagle3-chain", {**METHODS["eagle3"][0], "tree": chain}),
        method("eagle-torch", {**METHODS["eagle"][0], "backend": "torch"}),
    ]
    fixed = {
        (adapting, other)
        for adapting in ("eagle3-adaptive", "eagle3-lookup", "eagle3-adaptive-lookup")
        for other in ("eagle3", "eagle3-chain")
    }
    fixed.add(("eagle3-adaptive-lookup", "eagle3-lookup"))
    assert set(rivals(methods, {})) == fixed
    families = bench.families(methods)
    assert families == {"eagle": "eagle", "eagle3": "eagle3"}
    earlier = {("eagle3", other) for other in ("eagle", "eagle2", "speculative-sampling")}
    assert set(rivals(methods, families)) == fixed | earlier


@pytest.mark.slow
def test_a_compiled_draft_proposes_the_same(bench: Bench) -> None:
    values, _ = METHODS["eagle3"]
    plain = bench.decoder(method("eagle3", values)).generate([5, 17, 60], 30, Sampling())
    compiled = bench.decoder(method("eagle3-compile", {**values, "backend": "compile"}))
    generation = compiled.generate([5, 17, 60], 30, Sampling())
    assert generation.token_ids == plain.token_ids
    assert generation.accepted_drafts == plain.accepted_drafts
