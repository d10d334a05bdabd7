"""The engine: every method gives the target's own tokens, stops exactly, and counts what it produced."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from eagle3.decoding import engine as engine_module
from eagle3.decoding.adaptive import AdaptiveShape, RoundCosts
from eagle3.decoding.cache import KVCache
from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.hybrid_drafter import HybridDrafter
from eagle3.decoding.independent_drafter import IndependentDrafter
from eagle3.decoding.prompt_lookup import NgramIndex, PromptLookupDrafter
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import EAGLE_TREE, Shape, StaticTree, TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target
from tests.decoding.drafts import ScriptedDraft, random_draft
from tests.tiny import tiny_llama

GREEDY = Sampling()
PROMPT = [5, 17, 60, 3, 99, 17, 60, 41]
NEVER: frozenset[int] = frozenset()


def stopping_at(target: Target, eos: frozenset[int]) -> Target:
    """The same target with other EOS tokens."""
    other = copy.copy(target)
    other.eos_token_ids = eos
    return other


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    return stopping_at(tiny_target, NEVER)


@pytest.fixture(scope="module")
def small_model(target: Target) -> Target:
    """An independent draft model with the target's tokenizer."""
    return Target(tiny_llama(layers=2, seed=1), target.tokenizer, capture_layers=(1, 2))


SHAPES: list[Shape] = [
    TreeShape.chain(1),
    TreeShape.chain(5),
    TreeShape(1, 4, 5),
    TreeShape(3, 2, 6),
    TreeShape(4, 3, 24),
    TreeShape(5, 8, 64),
    EAGLE_TREE,
    StaticTree(((0,), (1,), (1, 0), (1, 1), (1, 1, 0))),
    # Verification nearly free, and as dear as a draft step: whole trees, and short ones.
    AdaptiveShape(TreeShape(4, 3, 20), RoundCosts((0.0, *(1 + 0.001 * n for n in range(20))), 0.01, 0.0)),
    AdaptiveShape(TreeShape(4, 3, 20), RoundCosts((0.0, *(1 + 0.1 * n for n in range(20))), 0.1, 0.1)),
    # Trees cut short, and rounds that draft nothing at all.
    TreeShape(4, 3, 24, confidence=0.004),
    TreeShape(4, 3, 24, confidence=0.5),
]


def drafters(target: Target, small_model: Target) -> dict[str, Drafter]:
    result: dict[str, Drafter] = {
        "lookup": PromptLookupDrafter(num_steps=4),
        "independent": IndependentDrafter(small_model, target, 3),
        "itself": IndependentDrafter(target, target, 4),
    }
    for i, shape in enumerate(SHAPES):
        for family, vocabulary in (("eagle3", 100), ("eagle3", None), ("eagle", None)):
            draft = random_draft(target, family, vocabulary, seed=i)
            result[f"{family}-{vocabulary}-{i}"] = EagleDrafter(draft, shape)
    for min_ngram in (1, 3):
        head = EagleDrafter(random_draft(target), TreeShape(3, 2, 6))
        result[f"hybrid-{min_ngram}"] = HybridDrafter(head, num_steps=7, min_ngram=min_ngram, max_ngram=3)
    unfused = random_draft(target, fused=False)
    result["eagle3-unfused"] = EagleDrafter(unfused, TreeShape(3, 2, 6))
    return result


NAMES = [
    *("lookup", "independent", "itself"),
    *(
        f"{family}-{vocabulary}-{i}"
        for i in range(len(SHAPES))
        for family, vocabulary in (("eagle3", 100), ("eagle3", None), ("eagle", None))
    ),
    *("hybrid-1", "hybrid-3", "eagle3-unfused"),
]


@pytest.fixture(scope="module")
def decoders(target: Target, small_model: Target) -> dict[str, SpeculativeDecoder]:
    found = drafters(target, small_model)
    assert list(found) == NAMES
    return {name: SpeculativeDecoder(target, drafter, name) for name, drafter in found.items()}


# --- losslessness ---


@pytest.mark.parametrize("prompt", [PROMPT, [7], [5, 6] * 40], ids=["ordinary", "one token", "repetitive"])
def test_vanilla_equals_transformers_generate(target: Target, prompt: list[int]) -> None:
    expected = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, use_cache=True
    )
    generation = VanillaDecoder(target).generate(prompt, 30, GREEDY)
    assert list(generation.token_ids) == expected[0, len(prompt) :].tolist()
    assert generation.finish_reason == "length"
    assert generation.rounds == ()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_equals_vanilla(
    target: Target, decoders: dict[str, SpeculativeDecoder], name: str
) -> None:
    vanilla = VanillaDecoder(target)
    for prompt in (PROMPT, [7], [5, 6] * 40):
        assert (
            decoders[name].generate(prompt, 24, GREEDY).token_ids
            == vanilla.generate(prompt, 24, GREEDY).token_ids
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("independent", "itself")])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, seed=3), Sampling(0.7, top_k=20, top_p=0.9, seed=4)], ids=str
)
def test_sampled_output_equals_vanilla_with_the_same_seed(
    target: Target, decoders: dict[str, SpeculativeDecoder], name: str, sampling: Sampling
) -> None:
    # One random number a token, whatever was drafted: deterministic drafts leave even the samples unchanged.
    expected = VanillaDecoder(target).generate(PROMPT, 16, sampling).token_ids
    assert decoders[name].generate(PROMPT, 16, sampling).token_ids == expected


def test_some_random_drafts_are_accepted(decoders: dict[str, SpeculativeDecoder]) -> None:
    # Otherwise the tests above would not exercise compaction.
    for name in ("eagle3-None-5", "eagle-None-5", "lookup", "itself", "hybrid-1"):
        accepted = decoders[name].generate([5, 6] * 40, 60, GREEDY).accepted_drafts
        assert max(accepted) >= 1, name


def planted_compaction(self: KVCache, start: int, slots: list[int], row: int = 0) -> None:
    self.lengths[row] = start + len(slots)


@pytest.mark.parametrize(
    ("owner", "attribute", "bug"),
    [
        pytest.param(KVCache, "compact", planted_compaction, id="accepted slots not moved"),
        pytest.param(DraftTree, "mask", lambda self: None, id="tree verified with a causal mask"),
        pytest.param(
            DraftTree, "depths", property(lambda self: list(range(len(self.tokens)))), id="positions by node"
        ),
    ],
)
def test_bug_in_the_cycle_is_caught(
    target: Target, monkeypatch: pytest.MonkeyPatch, owner: type, attribute: str, bug: object
) -> None:
    """These bugs change tokens, and the comparison with vanilla sees them, even with a small tree."""
    sequence = [*PROMPT, *VanillaDecoder(target).generate(PROMPT, 40, GREEDY).token_ids]

    class SecondBest(ScriptedDraft):
        """Ranks the right token second, so that the accepted path is never the contiguous one."""

        def forward(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            output = super().forward(*arguments, **keywords)
            assert output.logits is not None
            output.logits[..., 11] += 10.0
            return output

    decoder = SpeculativeDecoder(
        target, EagleDrafter(SecondBest(target, sequence, right=True), TreeShape(3, 2, 11)), "second best"
    )
    assert decoder.generate(PROMPT, 30, GREEDY).token_ids == tuple(sequence[len(PROMPT) :][:30])
    monkeypatch.setattr(owner, attribute, bug)
    assert decoder.generate(PROMPT, 30, GREEDY).token_ids != tuple(sequence[len(PROMPT) :][:30])


def test_wrong_hidden_states_cost_acceptance_only(
    target: Target, small_model: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "at_nodes", lambda output, path: _first(output, len(path)))
    decoder = SpeculativeDecoder(target, EagleDrafter(random_draft(target), TreeShape(3, 3, 10)), "wrong")
    expected = VanillaDecoder(target).generate(PROMPT, 40, GREEDY).token_ids
    assert decoder.generate(PROMPT, 40, GREEDY).token_ids == expected


def _first(output, count):  # type: ignore[no-untyped-def]
    return engine_module.replace(
        output, logits=None, captured=output.captured[:, :count] * 0, final=output.final[:, :count] * 0
    )


# --- acceptance counts ---

DEEP: list[Shape] = [TreeShape.chain(4), TreeShape(4, 3, 20), EAGLE_TREE]


@pytest.mark.parametrize(
    "shape", [TreeShape.chain(4), TreeShape(4, 3, 20), EAGLE_TREE], ids=["chain", "dynamic", "static"]
)
def test_a_draft_that_is_always_right(target: Target, shape: Shape) -> None:
    sequence = [*PROMPT, *VanillaDecoder(target).generate(PROMPT, 60, GREEDY).token_ids]
    drafter = EagleDrafter(ScriptedDraft(target, sequence, right=True), shape)
    generation = SpeculativeDecoder(target, drafter, "right").generate(PROMPT, 41, GREEDY)
    assert list(generation.token_ids) == sequence[len(PROMPT) :][:41]
    depth = 5 if shape is EAGLE_TREE else 4
    assert generation.acceptance_lengths == (depth + 1,) * (40 // (depth + 1)) + (
        (40 % (depth + 1),) if 40 % (depth + 1) else ()
    )
    assert set(generation.accepted_drafts) == {depth}
    assert set(generation.drafted_depths) == {depth}


@pytest.mark.parametrize(
    "shape", [TreeShape.chain(4), TreeShape(4, 3, 20), EAGLE_TREE], ids=["chain", "dynamic", "static"]
)
def test_a_draft_that_is_always_wrong(target: Target, shape: Shape) -> None:
    sequence = [*PROMPT, *VanillaDecoder(target).generate(PROMPT, 60, GREEDY).token_ids]
    drafter = EagleDrafter(ScriptedDraft(target, sequence, right=False), shape)
    generation = SpeculativeDecoder(target, drafter, "wrong").generate(PROMPT, 20, GREEDY)
    assert list(generation.token_ids) == sequence[len(PROMPT) :][:20]
    assert generation.acceptance_lengths == (1,) * 19
    assert generation.accepted_drafts == (0,) * 19


def test_a_hybrid_copies_what_it_has_seen_and_drafts_the_rest(target: Target) -> None:
    """The head is always right, so every round ends at its depth of 2, or at a copy of up to 7 tokens."""
    prompt = [5, 6] * 40
    sequence = [*prompt, *VanillaDecoder(target).generate(prompt, 60, GREEDY).token_ids]
    head = EagleDrafter(ScriptedDraft(target, sequence, right=True), TreeShape.chain(2))
    drafter = HybridDrafter(head, num_steps=7, min_ngram=2, max_ngram=3)
    generation = SpeculativeDecoder(target, drafter, "hybrid").generate(prompt, 50, GREEDY)
    assert list(generation.token_ids) == sequence[len(prompt) :][:50]
    depths = set(generation.drafted_depths)
    assert 2 in depths, "some rounds are drafted by the head"
    assert 7 in depths, "some rounds are copied"


def test_a_model_that_drafts_for_itself(target: Target) -> None:
    decoder = SpeculativeDecoder(target, IndependentDrafter(target, target, 4), "itself")
    assert set(decoder.generate(PROMPT, 41, GREEDY).accepted_drafts) == {4}
    sampled = decoder.generate(PROMPT, 41, Sampling(temperature=1.0, seed=1))
    assert set(sampled.accepted_drafts) == {4}, "p = q is always accepted"


def test_rounds_add_up(decoders: dict[str, SpeculativeDecoder]) -> None:
    generation = decoders["eagle3-None-4"].generate(PROMPT, 30, GREEDY)
    assert 1 + sum(generation.acceptance_lengths) == len(generation.token_ids) == 30
    for r in generation.rounds:
        assert 1 <= r.produced <= r.accepted + 1 <= r.depth + 1 <= r.nodes
    parts = (
        generation.draft_seconds
        + generation.verify_seconds
        + generation.accept_seconds
        + generation.cache_seconds
    )
    assert 0 < parts <= generation.decode_seconds
    assert generation.prefill_seconds > 0


# --- stopping ---


@pytest.mark.parametrize("stop", range(1, 12))
def test_stops_exactly_at_eos_inside_a_path(target: Target, stop: int) -> None:
    answer = VanillaDecoder(target).generate(PROMPT, 60, GREEDY).token_ids
    eos = answer[stop]
    first = answer.index(eos)
    stopping = stopping_at(target, frozenset({eos}))
    drafter = EagleDrafter(ScriptedDraft(target, [*PROMPT, *answer], right=True), TreeShape.chain(4))
    generation = SpeculativeDecoder(stopping, drafter, "right").generate(PROMPT, 60, GREEDY)
    assert generation.token_ids == answer[: first + 1]
    assert generation.finish_reason == "stop"
    assert sum(generation.acceptance_lengths) == first
    assert VanillaDecoder(stopping).generate(PROMPT, 60, GREEDY).token_ids == answer[: first + 1]


def test_eos_as_the_very_first_token(target: Target) -> None:
    answer = VanillaDecoder(target).generate(PROMPT, 1, GREEDY).token_ids
    stopping = stopping_at(target, frozenset(answer))
    for decoder in (
        VanillaDecoder(stopping),
        SpeculativeDecoder(stopping, PromptLookupDrafter(), "lookup"),
    ):
        generation = decoder.generate(PROMPT, 20, GREEDY)
        assert generation.token_ids == answer
        assert generation.finish_reason == "stop"
        assert generation.rounds == ()


@pytest.mark.parametrize("limit", range(1, 13))
def test_never_exceeds_max_new_tokens(target: Target, limit: int) -> None:
    answer = VanillaDecoder(target).generate(PROMPT, 60, GREEDY).token_ids
    drafter = EagleDrafter(ScriptedDraft(target, [*PROMPT, *answer], right=True), TreeShape.chain(4))
    generation = SpeculativeDecoder(target, drafter, "right").generate(PROMPT, limit, GREEDY)
    assert generation.token_ids == answer[:limit]
    assert generation.finish_reason == "length"
    assert 1 + sum(generation.acceptance_lengths) == limit


def test_eos_at_the_limit_is_a_stop(target: Target) -> None:
    answer = VanillaDecoder(target).generate(PROMPT, 10, GREEDY).token_ids
    limit = answer.index(answer[4]) + 1
    generation = VanillaDecoder(stopping_at(target, frozenset({answer[4]}))).generate(PROMPT, limit, GREEDY)
    assert generation.finish_reason == "stop"


# --- requests ---


def test_too_long_requests_are_refused_before_anything_runs(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(target, EagleDrafter(random_draft(target), TreeShape(3, 2, 6)), "eagle3")
    context = target.config.max_position_embeddings
    longest = [3] * (context - 10 - 6)
    assert len(decoder.generate(longest, 10, GREEDY).token_ids) == 10

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(target, "forward", refuse)
    with pytest.raises(ValueError, match=rf"needs {context + 1} positions .* has {context}"):
        decoder.generate([*longest, 3], 10, GREEDY)
    with pytest.raises(ValueError, match=rf"needs {context + 1} positions"):
        VanillaDecoder(target).generate([3] * (context - 9), 10, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "limit", "message"), [([], 5, "prompt is empty"), ([1], 0, "max_new_tokens = 0")]
)
def test_empty_requests_are_refused(target: Target, prompt: list[int], limit: int, message: str) -> None:
    for decoder in (VanillaDecoder(target), SpeculativeDecoder(target, PromptLookupDrafter(), "lookup")):
        with pytest.raises(ValueError, match=message):
            decoder.generate(prompt, limit, GREEDY)


@pytest.mark.parametrize("name", ["eagle3-100-4", "eagle-None-6", "lookup", "independent"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, seed=9)], ids=["greedy", "sampled"])
def test_a_decoder_keeps_nothing_from_one_request_to_the_next(
    target: Target, small_model: Target, name: str, sampling: Sampling
) -> None:
    """A conversation's second turn, after longer and shorter requests, is what a fresh decoder gives."""

    def fresh() -> SpeculativeDecoder:
        return SpeculativeDecoder(target, drafters(target, small_model)[name], name)

    used = fresh()
    first = used.generate(PROMPT, 20, sampling).token_ids
    second_turn = [*PROMPT, *first, 8, 9, 10]
    used.generate([4] * 200, 30, sampling)
    again = used.generate(second_turn, 30, sampling)
    expected = fresh().generate(second_turn, 30, sampling)
    assert again.token_ids == expected.token_ids
    assert again.acceptance_lengths == expected.acceptance_lengths


# --- the drafters ---


@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_every_tree_node_is_drafted_as_if_its_path_were_a_chain(target: Target, family: str) -> None:
    """Tree attention of the draft: a node sees its ancestors, at their positions, and no other branch."""
    draft = random_draft(target, family, seed=3)
    prompt = torch.tensor([PROMPT])
    positions = torch.arange(len(PROMPT))[None]
    with torch.inference_mode():
        output = target.forward(prompt, positions, target.new_cache(64), logits="last")
        assert output.logits is not None
        token = int(output.logits[0, -1].argmax())
        drafter = EagleDrafter(draft, TreeShape(num_steps=4, topk=3, num_draft_tokens=31))
        drafter.start(PROMPT, token, output, GREEDY, slots=64)
        tree = drafter.propose()
        assert max(tree.depths) == 4

        for leaf in range(len(tree.tokens)):
            path = [tree.tokens[node] for node in tree.path(leaf)]
            cache = draft.new_cache(64)
            step = draft.forward(
                torch.tensor([[*PROMPT[1:], token]]), draft.fuse(output), positions, cache, logits="last"
            )
            for depth, drafted in enumerate(path[1:]):
                assert step.logits is not None
                likeliest = step.logits[0, -1].topk(3).indices
                assert drafted in draft.draft_to_target[likeliest].tolist()
                step = draft.forward(
                    torch.tensor([[drafted]]),
                    step.hidden[:, -1:],
                    torch.tensor([[len(PROMPT) + depth]]),
                    cache,
                )


def test_draft_cache_holds_exactly_the_accepted_sequence(target: Target) -> None:
    """What a long generation leaves behind drafts the same tree as a draft that starts at that point."""
    draft = random_draft(target, seed=3)
    shape = TreeShape(3, 3, 12)
    drafter = EagleDrafter(draft, shape)
    proposals: dict[int, DraftTree] = {}
    propose = drafter.propose

    def recording() -> DraftTree:
        tree = propose()
        proposals[drafter._cache.lengths[0]] = tree
        return tree

    drafter.propose = recording  # type: ignore[method-assign]
    answer = SpeculativeDecoder(target, drafter, "eagle3").generate(PROMPT, 40, GREEDY).token_ids
    sequence = [*PROMPT, *answer]
    assert len(proposals) > 5
    fresh = EagleDrafter(draft, shape)
    with torch.inference_mode():
        for length, tree in proposals.items():
            ids = torch.tensor([sequence[:length]])
            output = target.forward(ids, torch.arange(length)[None], target.new_cache(64), logits="none")
            fresh.start(sequence[:length], sequence[length], output, GREEDY, slots=64)
            assert fresh.propose() == tree


def test_topk_beyond_the_draft_vocabulary_is_refused(target: Target) -> None:
    draft = random_draft(target, draft_vocab_size=4)
    with pytest.raises(ValueError, match="topk = 5: the draft vocabulary has only 4"):
        EagleDrafter(draft, TreeShape(2, 5, 8))


def test_draft_model_with_another_vocabulary_is_refused(target: Target) -> None:
    other = Target(tiny_llama(vocab_size=300, layers=2), target.tokenizer, capture_layers=(1, 2))
    with pytest.raises(ValueError, match="vocabulary of 300, the target of 320"):
        IndependentDrafter(other, target, 3)


def test_draft_model_with_another_tokenizer_is_refused(target: Target) -> None:
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.add_tokens(["<another>"])
    other = Target(tiny_llama(layers=2), tokenizer, capture_layers=(1, 2))
    with pytest.raises(ValueError, match="tokenizer"):
        IndependentDrafter(other, target, 3)


def test_draft_model_with_a_shorter_context_is_refused(target: Target) -> None:
    other = Target(tiny_llama(layers=2, context=32), target.tokenizer, capture_layers=(1, 2))
    decoder = SpeculativeDecoder(target, IndependentDrafter(other, target, 3), "independent")
    with pytest.raises(ValueError, match="the draft model has 32"):
        decoder.generate(PROMPT, 60, GREEDY)


def test_ngram_index_finds_the_latest_earlier_occurrence() -> None:
    index = NgramIndex(1, 3)
    index.extend([1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3])
    assert index.continuation(3) == [5, 9, 2], "the longest ending that occurred before is (2, 3)"
    index.extend([4])
    assert index.continuation(2) == [1, 2], "(2, 3, 4)"
    index.extend([77])
    assert index.continuation(2) == []
    index.extend([77])
    assert index.continuation(2) == [77], "an n-gram does not find itself, but an overlapping earlier one"


@pytest.mark.parametrize(
    "make", [lambda: PromptLookupDrafter(0), lambda: PromptLookupDrafter(3, max_ngram=1, min_ngram=2)]
)
def test_impossible_lookups_are_refused(make: Callable[[], PromptLookupDrafter]) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1|need 1 <="):
        make()
