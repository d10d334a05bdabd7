"""Drafting at inference equals the training-time test, position by position and depth by depth.

A draft that is trained on one arrangement of tokens, states and positions and decodes with another loses
acceptance without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.models.draft import DraftOutput, check_draft_settings
from eagle3.models.eagle import EagleDraft
from eagle3.models.eagle3 import Eagle3Draft, Eagle3Module
from eagle3.models.target import Target, TargetOutput
from eagle3.training import unroll
from eagle3.training.objective import Eagle3Objective, EagleObjective
from eagle3.training.unroll import Unroll
from tests.models.drafts import random_eagle, random_eagle3
from tests.models.families import tiny_model
from tests.tiny import tiny_tokenizer
from tests.training.samples import eagle3_settings, eagle_settings, sample_batch

LENGTH = 12
DEPTH = 5
KERNELS = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
OPTIONS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "no shared keys": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
}


def target_states(target: Target, ids: Sequence[int]) -> TargetOutput:
    positions = torch.arange(len(ids))[None]
    return target.forward(torch.tensor([ids]), positions, target.new_cache(len(ids)), logits="none")


def random_ids(length: int = LENGTH, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain(
    draft: Eagle3Draft | EagleDraft, states: TargetOutput, ids: Sequence[int], start: int, depth: int
) -> list[DraftOutput]:
    """Draft as decoding does: the context up to `start` at once, then the row's own tokens one by one."""
    cache = draft.new_cache(len(ids) + depth)
    context = torch.tensor([ids[1 : start + 2]])
    fused = draft.fuse(states)[:, : start + 1]
    outputs = [draft.forward(context, fused, torch.arange(start + 1)[None], cache)]
    for step in range(1, depth):
        token, position = torch.tensor([[ids[start + 1 + step]]]), torch.tensor([[start + step]])
        outputs.append(draft.forward(token, outputs[-1].hidden[:, -1:], position, cache))
    return outputs


def unrolled(module: Eagle3Module, target: Target, states: TargetOutput, ids: Sequence[int]) -> list[Tensor]:
    """The layer outputs of every step of the training-time test, [T, H] each."""
    captured = torch.cat((states.captured, torch.zeros(1, 1, states.captured.shape[-1])), dim=1)
    training = Unroll(module, target.embed_weight, module.config.rotary())
    with torch.no_grad():
        return [output[0] for output in training.steps(torch.tensor([ids]), captured, DEPTH)]


def assert_parity(target: Target, module: Eagle3Module, compiled: bool = True) -> None:
    """Chains started at every position equal the steps of the training-time test there."""
    ids = random_ids()
    states = target_states(target, ids[:-1])
    steps = unrolled(module, target, states, ids)
    draft = Eagle3Draft(module, target, compiled=compiled)
    compared = 0
    with torch.no_grad():
        for start in range(LENGTH - 1):
            depth = min(DEPTH, LENGTH - 1 - start)
            for step, output in enumerate(chain(draft, states, ids, start, depth)):
                trained = steps[step][start]
                assert output.logits is not None
                torch.testing.assert_close(
                    output.hidden[0, -1], module.feed_back(trained), rtol=1e-4, atol=1e-4
                )
                logits = module.lm_head(module.norm(trained))
                torch.testing.assert_close(output.logits[0, -1], logits, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == 5 * 7 + 4 + 3 + 2 + 1


@KERNELS
@pytest.mark.parametrize("name", OPTIONS)
def test_a_chain_of_drafts_equals_the_training_time_test(
    tiny_target: Target, name: str, compiled: bool
) -> None:
    assert_parity(tiny_target, random_eagle3(tiny_target, **OPTIONS[name]), compiled)


@pytest.mark.parametrize("name", ["llama with llama3 rope", "qwen3", "llama of odd sizes"])
def test_parity_for_targets_of_other_shapes(name: str) -> None:
    target = Target(tiny_model(name), tiny_tokenizer())
    assert_parity(target, random_eagle3(target))


def shifted_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], chosen: Tensor | None
) -> Tensor:
    """The released bug: step i sees the real context only up to t - i."""
    assert chosen is None
    group = query.shape[1] // keys[0].shape[1]
    length, step = query.shape[2], len(keys) - 1
    seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
    own = torch.eye(length, dtype=torch.bool)
    mask = torch.cat([seen, *[own] * step], dim=1)
    every_key = torch.cat([key.repeat_interleave(group, 1) for key in keys], dim=2)
    every_value = torch.cat([value.repeat_interleave(group, 1) for value in values], dim=2)
    return torch.nn.functional.scaled_dot_product_attention(query, every_key, every_value, attn_mask=mask)


def test_parity_notices_an_attention_mask_that_shifts(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unroll, "test_time_attention", shifted_attention)
    with pytest.raises(AssertionError, match="not close"):
        assert_parity(tiny_target, random_eagle3(tiny_target))


@pytest.mark.parametrize("wrong", ["hidden", "token", "position"])
def test_parity_notices_every_shift_by_one(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The comparison depends on the token, the state and the rotary position of every step."""
    original = Unroll._step

    def shifted(self: Unroll, step: int, token_ids: Tensor, hidden: Tensor, chosen: Tensor | None) -> Tensor:
        if wrong == "hidden":
            hidden = hidden.roll(1, dims=1)
        elif wrong == "token":
            token_ids = token_ids.roll(1, dims=1)
        return original(self, step + (wrong == "position" and step > 0), token_ids, hidden, chosen)

    monkeypatch.setattr(Unroll, "_step", shifted)
    with pytest.raises(AssertionError, match="not close"):
        assert_parity(tiny_target, random_eagle3(tiny_target))


@KERNELS
def test_a_branch_of_a_tree_equals_the_training_time_test(tiny_target: Target, compiled: bool) -> None:
    """Siblings in the cache, hidden by a mask over this round's slots, change nothing about a branch."""
    module = random_eagle3(tiny_target)
    ids = random_ids()
    states = target_states(tiny_target, ids[:-1])
    steps = unrolled(module, tiny_target, states, ids)
    draft = Eagle3Draft(module, tiny_target, compiled=compiled)
    start, cache = 5, draft.new_cache(LENGTH + 8)
    context = torch.tensor([ids[1 : start + 2]])
    with torch.no_grad():
        root = draft.forward(context, draft.fuse(states)[:, : start + 1], torch.arange(6)[None], cache)
        # Level 1: the row's token between two others, each seeing itself alone.
        state = root.hidden[:, -1:].expand(1, 3, -1)
        level = torch.tensor([[77, ids[start + 2], 88]])
        mask = torch.eye(3, dtype=torch.bool)
        first = draft.forward(level, state, torch.full((1, 3), start + 1), cache, mask)
        torch.testing.assert_close(
            first.hidden[0, 1], module.feed_back(steps[1][start]), rtol=1e-4, atol=1e-4
        )
        # Level 2: children of nodes 2, 1 and 1 over the last six slots; the row's token is the second.
        state = first.hidden[:, [2, 1, 1]]
        level = torch.tensor([[99, ids[start + 3], 111]])
        mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1]], dtype=torch.bool)
        second = draft.forward(level, state, torch.full((1, 3), start + 2), cache, mask)
        torch.testing.assert_close(
            second.hidden[0, 1], module.feed_back(steps[2][start]), rtol=1e-4, atol=1e-4
        )


# --- what training predicts is what decoding drafts ---


def test_predictions_of_training_are_the_drafts_of_decoding(tiny_target: Target) -> None:
    module = random_eagle3(tiny_target)
    batch = sample_batch(tiny_target, exact=True)
    objective = Eagle3Objective(
        module,
        tiny_target.embed_weight,
        tiny_target.lm_head_weight,
        eagle3_settings(),
        0.5,
        torch.ones(module.fc.in_features),
    )
    predictions = list(objective.predictions(batch, 3))
    draft = Eagle3Draft(module, tiny_target)
    compare_predictions(tiny_target, draft, batch_rows(batch), predictions, draft.draft_to_target)


def test_predictions_of_eagle_training_are_the_drafts_of_decoding(tiny_target: Target) -> None:
    module = random_eagle(tiny_target)
    batch = sample_batch(tiny_target, exact=True)
    vocabulary = torch.arange(0, 320, 2)
    objective = EagleObjective(
        module, tiny_target.embed_weight, tiny_target.lm_head_weight, vocabulary, eagle_settings(), 0.5
    )
    predictions = list(objective.predictions(batch, 3))
    compare_predictions(
        tiny_target, EagleDraft(module, tiny_target), batch_rows(batch), predictions, vocabulary, vocabulary
    )


def batch_rows(batch: Any) -> list[list[int]]:
    return [ids[:length].tolist() for ids, length in zip(batch.token_ids, batch.lengths, strict=True)]


def compare_predictions(
    target: Target,
    draft: Eagle3Draft | EagleDraft,
    rows: list[list[int]],
    predictions: list[Tensor],
    mapping: Tensor,
    columns: Tensor | None = None,
) -> None:
    """Padded rows of different lengths, every start and depth; `columns` restricts the draft's logits."""
    seen = set()
    for index, ids in enumerate(rows):
        states = target_states(target, ids[:-1])
        for start in range(0, len(ids) - 3, 3):
            with torch.no_grad():
                outputs = chain(draft, states, ids, start, 3)
            for step, output in enumerate(outputs):
                assert output.logits is not None
                logits = output.logits[0, -1]
                best = (logits if columns is None else logits[columns]).argmax()
                assert predictions[step][index, start] == mapping[best]
                seen.add(int(mapping[best]))
    assert len(seen) > 10


# --- EAGLE-3.1's options and EAGLE ---


def test_norm_output_feeds_back_the_normed_state_and_changes_nothing_else(tiny_target: Target) -> None:
    plain, normed = random_eagle3(tiny_target), random_eagle3(tiny_target, norm_output=True)
    ids = random_ids()
    states = target_states(tiny_target, ids[:-1])
    outputs = {}
    for module in (plain, normed):
        draft = Eagle3Draft(module, tiny_target)
        outputs[module.config.norm_output] = chain(draft, states, ids, 6, 2)
    first, second = outputs[False], outputs[True]
    assert first[0].logits is not None
    assert second[0].logits is not None
    assert torch.equal(first[0].logits, second[0].logits)
    with torch.no_grad():
        torch.testing.assert_close(plain.norm(first[0].hidden), second[0].hidden)
    assert first[1].logits is not None
    assert second[1].logits is not None
    assert not torch.allclose(first[1].logits, second[1].logits, atol=1e-2)


def test_fc_norm_makes_the_fusion_independent_of_the_scale_of_a_state(tiny_target: Target) -> None:
    states = target_states(tiny_target, random_ids())
    louder = states.captured.clone()
    louder[..., :32] *= 100
    scaled = TargetOutput(None, louder, states.final)
    with_norm = Eagle3Draft(random_eagle3(tiny_target, fc_norm=True), tiny_target)
    without = Eagle3Draft(random_eagle3(tiny_target), tiny_target)
    torch.testing.assert_close(with_norm.fuse(scaled), with_norm.fuse(states), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(without.fuse(scaled), without.fuse(states), atol=1)


def test_fc_reads_the_captured_states_in_their_order(tiny_target: Target) -> None:
    module = random_eagle3(tiny_target)
    with torch.no_grad():
        module.fc.weight.zero_()
        module.fc.weight[:, 32:64] = torch.eye(32)
    states = target_states(tiny_target, random_ids())
    draft = Eagle3Draft(module, tiny_target)
    torch.testing.assert_close(draft.fuse(states), states.captured[..., 32:64])


def test_eagle_reads_the_final_state_and_proposes_through_the_targets_head(tiny_target: Target) -> None:
    """With fc passing the feature on and a layer that adds nothing, EAGLE repeats the target's own logits."""
    module = random_eagle(tiny_target)
    layer: Any = module.layers[0]
    with torch.no_grad():
        module.fc.weight.zero_()
        module.fc.weight[:, 32:] = torch.eye(32)
        module.fc.bias.zero_()
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    ids = random_ids()
    states = target_states(tiny_target, ids[:-1])
    draft = EagleDraft(module, tiny_target)
    assert draft.fuse(states) is states.final
    (output,) = chain(draft, states, ids, LENGTH - 2, 1)
    assert output.logits is not None
    torch.testing.assert_close(output.logits, tiny_target.logits(states.final))
    torch.testing.assert_close(output.hidden, states.final)


@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_rows_of_a_draft_are_bitwise_the_rows_alone(tiny_target: Target, family: str) -> None:
    draft: Eagle3Draft | EagleDraft
    if family == "eagle3":
        draft = Eagle3Draft(random_eagle3(tiny_target), tiny_target)
    else:
        draft = EagleDraft(random_eagle(tiny_target), tiny_target)
    torch.manual_seed(0)
    tokens, hidden = torch.randint(0, 320, (8, 3)), torch.randn(8, 3, 32)
    positions = torch.arange(3).expand(8, 3)
    together = draft.forward(tokens, hidden, positions, draft.new_cache(4, 8))
    assert together.logits is not None
    for row in range(8):
        one = slice(row, row + 1)
        alone = draft.forward(tokens[one], hidden[one], positions[one], draft.new_cache(4))
        assert alone.logits is not None
        assert torch.equal(alone.hidden[0], together.hidden[row])
        assert torch.equal(alone.logits[0], together.logits[row])


def test_logits_of_the_last_position_and_none(tiny_target: Target) -> None:
    for draft in (
        Eagle3Draft(random_eagle3(tiny_target), tiny_target),
        EagleDraft(random_eagle(tiny_target), tiny_target),
    ):
        tokens, hidden = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, 32)
        positions = torch.arange(3)[None]
        every, last, none = (
            draft.forward(tokens, hidden, positions, draft.new_cache(4), logits=kind)
            for kind in ("all", "last", "none")
        )
        assert every.logits is not None
        assert last.logits is not None
        assert torch.equal(last.logits, every.logits[:, -1:])
        assert none.logits is None
        assert torch.equal(none.hidden, every.hidden)


@pytest.mark.parametrize(
    ("draft", "vocabulary", "message"),
    [
        (SimpleNamespace(num_key_value_heads=5), 100, r"drafts\.mine\.num_key_value_heads: 5 .* 12 heads"),
        (SimpleNamespace(layers=(0, 8)), 100, r"drafts\.mine\.layers: \[0, 8\] .* from 0 to 7"),
        (SimpleNamespace(num_key_value_heads=None), 400, r"vocabulary\.size: 400 .* 320 tokens"),
    ],
)
def test_a_draft_that_cannot_be_built_for_the_target_is_refused(
    draft: SimpleNamespace, vocabulary: int, message: str
) -> None:
    """Before hours of regeneration, with the key of params.yaml."""
    with pytest.raises(ValueError, match=message):
        check_draft_settings("mine", draft, vocabulary, vocab_size=320, heads=12, layers=8)
    for possible in (SimpleNamespace(num_key_value_heads=4), SimpleNamespace(layers=(0, 7))):
        check_draft_settings("mine", possible, 320, vocab_size=320, heads=12, layers=8)
