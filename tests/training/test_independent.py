"""The independent draft: judged on the same tokens as the other drafts, stored as a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.independent_drafter import IndependentDrafter
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.checkpoint import save_draft
from eagle3.models.independent import (
    IndependentModule,
    import_independent,
    load_independent,
    save_independent,
)
from eagle3.models.target import Target
from eagle3.training.independent import IndependentObjective
from tests.models.drafts import random_eagle3
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.training.samples import sample_batch, train_settings
from tests.training.trainings import Training, assert_equal_weights


def objective(target: Target, layers: tuple[int, ...] = (0, 7), size: int = 320) -> IndependentObjective:
    module = IndependentModule(target, layers)
    return IndependentObjective(
        module, target.embed_weight, target.lm_head_weight, torch.arange(0, 320, 320 // size), 0.5
    )


def test_loss_position_by_position(tiny_target: Target) -> None:
    """With every token in the draft vocabulary nothing is drawn, and the sum can be written out."""
    wanted, batch = objective(tiny_target), sample_batch(tiny_target, exact=True)
    hidden = wanted.module(F.embedding(batch.token_ids, tiny_target.embed_weight))
    total, weights = torch.zeros(()), 0.0
    for row, length in enumerate(batch.lengths.tolist()):
        for judged in range(2, length):  # the token that is predicted
            weight = 1.0 if batch.answer_mask[row, judged] else 0.5
            goal = (batch.final[row, judged - 1] @ tiny_target.lm_head_weight.T).softmax(-1)
            logits = hidden[row, judged - 1] @ tiny_target.lm_head_weight.T
            total = total + weight * F.cross_entropy(logits, goal)
            weights += weight
    terms = wanted.loss(batch, 0.0, torch.Generator())
    assert torch.allclose(terms.loss, total / weights, rtol=1e-4)


def test_all_layers_are_the_target_itself(tiny_target: Target) -> None:
    """Then every prediction is the target's: no index is off by one, nor is the start."""
    wanted, batch = objective(tiny_target, tuple(range(8))), sample_batch(tiny_target, exact=True)
    assert wanted.loss(batch, 0.0, torch.Generator()).accuracy == (1.0,)
    for depth, predicted in enumerate(wanted.predictions(batch, 3)):
        for row, length in enumerate(batch.lengths.tolist()):
            for t in range(length - 2 - depth):
                assert predicted[row, t] == batch.target_argmax[row, t + 1 + depth]


def test_other_tokens_are_scored_beside_the_vocabulary(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing keeps their logits down. The same seed draws the same tokens, another others."""
    monkeypatch.setattr("eagle3.training.independent._OTHER_TOKENS", 20)
    wanted, batch = objective(tiny_target, size=160), sample_batch(tiny_target)

    def loss(seed: int) -> float:
        return wanted.loss(batch, 0.0, torch.Generator().manual_seed(seed)).loss.item()

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)


def test_training_learns_and_resumes(training: Training, tiny_target: Target, tmp_path: Path) -> None:
    settings = train_settings(token_budget=3000)
    result, weights = training.run(
        tmp_path / "whole", settings=settings, objective=objective(tiny_target, (0,))
    )
    assert result.acceptance_length >= 1.0
    training.kill(tmp_path / "killed", at=7, settings=settings, objective=objective(tiny_target, (0,)))
    again, resumed = training.run(
        tmp_path / "killed", settings=settings, objective=objective(tiny_target, (0,))
    )
    assert again == result
    assert_equal_weights(resumed, weights)


def test_stored_model_decodes_as_trained(tiny_target: Target, tmp_path: Path) -> None:
    module = IndependentModule(tiny_target, (0, 3, 7))
    with torch.no_grad():
        module.body.norm.weight.mul_(1.5)  # trained
    save_independent(tmp_path, module, tiny_target, {"data": "abc"})
    model = load_independent(tmp_path, torch.float32, "cpu")
    ids = torch.tensor([[5, 9, 200, 41]])
    expected = module(F.embedding(ids, tiny_target.embed_weight)) @ tiny_target.lm_head_weight.T
    actual = model.forward(ids, torch.arange(4)[None], model.new_cache(4)).logits
    assert actual is not None
    assert torch.allclose(actual, expected, atol=1e-4)
    IndependentDrafter(model, tiny_target, 2)  # fits the target


def test_a_model_from_elsewhere_drafts_if_it_has_the_targets_tokenizer(
    tiny_target: Target, tmp_path: Path
) -> None:
    smaller = tiny_llama(layers=1, hidden_size=16, heads=2, kv_heads=1, seed=7)
    smaller.save_pretrained(tmp_path / "theirs")
    tiny_tokenizer().save_pretrained(tmp_path / "theirs")
    import_independent(str(tmp_path / "theirs"), tmp_path / "draft", tiny_target)
    for weights in (torch.float32, torch.int8):
        model = load_independent(tmp_path / "draft", weights, "cpu")
        decoder = SpeculativeDecoder(tiny_target, IndependentDrafter(model, tiny_target, 3), "speculative")
        vanilla = VanillaDecoder(tiny_target).generate([5, 9, 200], 12, Sampling(0.0))
        assert decoder.generate([5, 9, 200], 12, Sampling(0.0)).token_ids == vanilla.token_ids


@pytest.mark.parametrize("vocabulary", [300, 320])
def test_a_model_of_another_tokenizer_is_refused_before_its_weights_are_read(
    tiny_target: Target, tmp_path: Path, vocabulary: int
) -> None:
    tiny_llama(layers=1, vocab_size=vocabulary).config.save_pretrained(tmp_path / "theirs")
    tokenizer = tiny_tokenizer(vocabulary)
    if vocabulary == 320:
        tokenizer.add_tokens(["<|another|>"])
    tokenizer.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="needs a draft model with the target's tokenizer"):
        import_independent(str(tmp_path / "theirs"), tmp_path / "draft", tiny_target)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("layers", [(), (7, 0), (0, 0), (0, 8)])
def test_layers_that_the_target_lacks_are_refused(tiny_target: Target, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="from 0 to 7"):
        IndependentModule(tiny_target, layers)


def test_a_head_is_no_model(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_independent(tmp_path, torch.float32, "cpu")
    save_draft(tmp_path, random_eagle3(tiny_target), tiny_target, {})
    with pytest.raises(ValueError, match="cannot decode by itself"):
        load_independent(tmp_path, torch.float32, "cpu")
