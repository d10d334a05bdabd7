"""Objectives: which positions carry loss, against what they are judged, and how the parts are weighed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.config import Eagle3Settings
from eagle3.data.hidden_states import RowStates
from eagle3.data.rows import Row
from eagle3.models.eagle3 import Eagle3Module
from eagle3.models.target import Target
from eagle3.training.batches import Batch, make_batch
from eagle3.training.objective import Eagle3Objective, EagleObjective, supervision
from eagle3.training.unroll import Unroll, choose_positions, shift_left
from tests.models.drafts import random_eagle, random_eagle3
from tests.training.samples import eagle3_settings, eagle_settings, sample_batch, steps


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def eagle3_objective(
    target: Target, settings: Eagle3Settings, module: Eagle3Module | None = None, prompt_loss: float = 0.5
) -> Eagle3Objective:
    module = module or random_eagle3(target)
    scale = torch.ones(module.fc.in_features)
    return Eagle3Objective(module, target.embed_weight, target.lm_head_weight, settings, prompt_loss, scale)


# --- supervision, worked by hand ---


def worked_batch() -> Batch:
    """Two rows in six places. Row 0: x0 x1 | x2 x3 x4, an answer of three tokens. Row 1: x0 | x1 x2 | x3."""
    return Batch(
        token_ids=torch.tensor([[10, 11, 12, 13, 14, 0], [20, 21, 22, 23, 0, 0]]),
        lengths=torch.tensor([5, 4]),
        answer_mask=torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]], dtype=torch.bool),
        captured=torch.zeros(2, 6, 1),
        final=torch.zeros(2, 6, 1),
        target_argmax=torch.tensor([[1, 2, 3, 4, -1, -1], [5, 6, 7, -1, -1, -1]]),
    )


EVERYTHING = torch.ones(30, dtype=torch.bool)


def test_shift_left() -> None:
    x = torch.tensor([[1, 2, 3, 4]])
    assert shift_left(x, 0).tolist() == [[1, 2, 3, 4]]
    assert shift_left(x, 1).tolist() == [[2, 3, 4, 0]]
    assert shift_left(x, 3).tolist() == [[4, 0, 0, 0]]
    assert shift_left(x[..., None], 2)[..., 0].tolist() == [[3, 4, 0, 0]]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # Position t is judged on token t + 2: row 0 on 2, 3 and 4 (answer); row 1 on 2 (answer), 3 (prompt).
        (0, [[1, 1, 1, 0, 0, 0], [1, 0.25, 0, 0, 0, 0]]),
        # Step 1, token t + 3: row 0 on tokens 3 and 4; row 1 on token 3, part of a prompt.
        (1, [[1, 1, 0, 0, 0, 0], [0.25, 0, 0, 0, 0, 0]]),
        (2, [[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
        (3, [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
    ],
)
def test_supervised_positions(step: int, expected: list[list[float]]) -> None:
    assert supervision(worked_batch(), step, 0.25, EVERYTHING).tolist() == expected


def test_without_prompt_loss_only_answers_count() -> None:
    weights = supervision(worked_batch(), 0, 0.0, EVERYTHING)
    assert weights.tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_a_choice_of_the_target_that_the_draft_cannot_propose_carries_no_loss() -> None:
    """Position t is judged on target_argmax[t + 1], the target's choice for token t + 2.

    Row 0, step 0: positions 0, 1, 2 are judged on the choices 2, 3, 4; without 3, position 1 drops out. At
    step 1 positions 0 and 1 are judged on 3 and 4, so position 0 does.
    """
    covered = EVERYTHING.clone()
    covered[3] = False
    assert supervision(worked_batch(), 0, 0.25, covered)[0].tolist() == [1, 0, 1, 0, 0, 0]
    assert supervision(worked_batch(), 1, 0.25, covered)[0].tolist() == [0, 1, 0, 0, 0, 0]


def test_ids_mask_and_goals_are_shifted_together(tiny_target: Target) -> None:
    """A row moved by one place in its batch (a neutral token in front) is judged on the same tokens.

    Shifting ids and goals but not the mask is a released bug; here it would move the answer's edge.
    """
    batch = worked_batch()
    moved = Batch(
        *(
            torch.cat((torch.zeros_like(part[:, :1]), part[:, :-1]), dim=1) if part.dim() > 1 else part + 1
            for part in (
                batch.token_ids,
                batch.lengths,
                batch.answer_mask,
                batch.captured,
                batch.final,
                batch.target_argmax,
            )
        )
    )
    for step in range(3):
        here = supervision(batch, step, 0.25, EVERYTHING)
        there = supervision(moved, step, 0.25, EVERYTHING)
        assert torch.equal(there[:, 1:], here[:, :-1])


# --- EAGLE-3 ---


def reference_loss(
    target: Target,
    module: Eagle3Module,
    batch: Batch,
    count: int,
    decay: float,
    prompt_loss: float,
    candidates: Tensor,
    chosen: Tensor,
) -> Tensor:
    """The loss position by position, as the paper says it; after the first step at the chosen positions.

    There a position stands for as many candidates of its row as there are to one that was chosen.
    """
    vocabulary = module.draft_to_target
    total, weight_sum = torch.zeros(()), 0.0
    outputs = Unroll(module, target.embed_weight, module.config.rotary()).steps(
        batch.token_ids, batch.captured, count
    )
    for step, output in enumerate(outputs):
        loss, weights = torch.zeros(()), 0.0
        for row, length in enumerate(batch.lengths.tolist()):
            for t in range(length):
                judged = t + 2 + step  # the token that position t predicts at this step
                if judged >= length or (step > 0 and t not in chosen[row]):
                    continue
                target_logits = batch.final[row, judged - 1] @ target.lm_head_weight.T
                if not bool((vocabulary == target_logits.argmax()).any()):
                    continue
                weight = 1.0 if batch.answer_mask[row, judged] else prompt_loss
                if step > 0:
                    weight *= int(candidates[row].sum()) / int(candidates[row, chosen[row]].sum())
                goal = target_logits.softmax(-1)[vocabulary]
                logits = module.lm_head(module.norm(output[row, t]))
                loss = loss + weight * F.cross_entropy(logits, goal / goal.sum())
                weights += weight
        total = total + decay**step * loss / max(weights, 1)
        weight_sum += decay**step
    return total / weight_sum


@pytest.mark.parametrize(("count", "share"), [(1, 1.0), (3, 1.0), (3, 0.3)])
def test_eagle3_loss_equals_its_definition_with_gradients(
    tiny_target: Target, count: int, share: float
) -> None:
    batch = sample_batch(tiny_target, 3, exact=True)
    module = random_eagle3(tiny_target)
    other = copy.deepcopy(module)
    settings = eagle3_settings(test_time=steps(count), test_time_share=share, step_decay=0.8, loss="soft_ce")
    terms = eagle3_objective(tiny_target, settings, module, 0.5).loss(batch, 0.0, generator())
    candidates = supervision(batch, 1, 0.5, module.t2d) > 0
    chosen, _ = choose_positions(candidates, share, generator())
    expected = reference_loss(tiny_target, other, batch, count, 0.8, 0.5, candidates, chosen)
    torch.testing.assert_close(terms.loss, expected)
    terms.loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        assert bool(mine.grad.any()), f"{name} does not learn"


def test_later_steps_are_made_at_candidates_drawn_evenly() -> None:
    """Ascending, no position twice, none beside the candidates while there are enough of these."""
    candidates = torch.zeros(2, 10, dtype=torch.bool)
    candidates[0, 3:9], candidates[1, :2] = True, True
    counts = torch.zeros(10)
    many = torch.Generator().manual_seed(3)
    for _ in range(600):
        chosen, stands_for = choose_positions(candidates, 0.25, many)
        assert chosen.shape == (2, 3)
        assert stands_for.tolist() == [[2], [1]]  # 3 of 6 candidates, and both of 2
        assert (chosen[:, 1:] > chosen[:, :-1]).all()
        assert candidates[0][chosen[0]].all()
        assert {0, 1} < set(chosen[1].tolist())
        counts[chosen[0]] += 1
    assert (counts[3:9] - 300).abs().max() < 60  # five standard deviations


def test_drawn_positions_stand_for_all_of_their_row(
    tiny_target: Target, rows: list[Row], states: Callable[[Row], RowStates]
) -> None:
    """Over many draws a later step's loss is that of all positions, though short rows are drawn whole.

    The short row has nearly no loss. By the positions drawn it would weigh almost half; it weighs a fifth.
    """
    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    batch = make_batch([by_length[0], by_length[-1]], states, tiny_target.hidden_size)
    batch = replace(batch, final=batch.final * torch.tensor([0.0, 1.0])[:, None, None])
    module = random_eagle3(tiny_target, size=320)

    def later_loss(share: float, seed: int) -> float:
        settings = eagle3_settings(test_time=steps(2), test_time_share=share)
        objective = eagle3_objective(tiny_target, settings, module, prompt_loss=1.0)
        # At the short row the goal is even: 1 / 320.
        objective._loss = lambda logits, goal, weights: (goal.amax(-1) * weights).sum()
        return objective.loss(batch, 0.0, torch.Generator().manual_seed(seed)).losses[1]

    draws = torch.tensor([later_loss(0.3, seed) for seed in range(100)])
    assert abs(draws.mean() - later_loss(1.0, 0)) < 5 * draws.std() / 10  # five standard errors


def test_steps_follow_the_progress_of_the_training(tiny_target: Target) -> None:
    phases = (
        {"from_share": 0.0, "steps": 1},
        {"from_share": 0.5, "steps": 3},
        {"from_share": 0.9, "steps": 2},
    )
    objective = eagle3_objective(tiny_target, eagle3_settings(test_time=phases))
    batch = sample_batch(tiny_target, 2)
    counts = [
        len(objective.loss(batch, progress, generator()).accuracy)
        for progress in (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)
    ]
    assert counts == [1, 1, 3, 3, 2, 2]


def test_accuracy_counts_answers_whose_choice_is_drafted(tiny_target: Target) -> None:
    """A head that always proposes one token is right exactly where the target chooses that token."""
    module = random_eagle3(tiny_target, size=320)
    batch = sample_batch(tiny_target, 4)
    judged = shift_left(batch.answer_mask, 2) & (
        torch.arange(batch.token_ids.shape[1])[None] + 2 < batch.lengths[:, None]
    )
    choices = shift_left(batch.target_argmax, 1)[judged]
    token = int(choices.mode().values)
    objective = eagle3_objective(tiny_target, eagle3_settings(test_time=steps(1)), module)

    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.eye(320)[token].expand(*x.shape[:-1], 320) + 0 * x.sum()

    module.lm_head = Constant()  # type: ignore[assignment]
    accuracy = objective.loss(batch, 0.0, generator()).accuracy
    assert accuracy == pytest.approx(((choices == token).float().mean().item(),))
    assert 0 < accuracy[0] < 1


def test_supervised_counts_positions_of_the_first_step(tiny_target: Target) -> None:
    batch = sample_batch(tiny_target, 4)
    module = random_eagle3(tiny_target)
    terms = eagle3_objective(tiny_target, eagle3_settings(test_time=steps(3)), module).loss(
        batch, 0.0, generator()
    )
    assert terms.supervised == int((supervision(batch, 0, 0.5, module.t2d) > 0).sum()) > 0


def test_padding_changes_nothing(tiny_target: Target) -> None:
    batch = sample_batch(tiny_target, 3)

    def padded(part: Tensor, value: float) -> Tensor:
        return torch.cat((part, torch.full_like(part[:, :4], value)), dim=1)

    longer = replace(
        batch,
        token_ids=padded(batch.token_ids, 0),
        answer_mask=padded(batch.answer_mask, False),
        captured=padded(batch.captured, 0),
        final=padded(batch.final, 0),
        target_argmax=padded(batch.target_argmax, -1),
    )
    settings = eagle3_settings(test_time=steps(3), test_time_share=1.0)  # which are drawn follows the width
    objective = eagle3_objective(tiny_target, settings)
    terms, more = (objective.loss(each, 0.0, generator()) for each in (batch, longer))
    torch.testing.assert_close(terms.loss, more.loss)
    assert (terms.accuracy, terms.supervised) == (more.accuracy, more.supervised)


def test_a_scale_is_trained_on_and_folded_into_fc_at_the_end(tiny_target: Target) -> None:
    """What decodes afterwards, without the scale, drafts as it was trained to."""
    module = random_eagle3(tiny_target)
    scale = torch.rand(96) * 10 + 0.1
    objective = Eagle3Objective(
        module, tiny_target.embed_weight, tiny_target.lm_head_weight, eagle3_settings(), 0.5, scale
    )
    batch = sample_batch(tiny_target, 3)
    scaled = list(objective.predictions(replace(batch, captured=batch.captured * scale), 2))
    unscaled = list(eagle3_objective(tiny_target, eagle3_settings(), module).predictions(batch, 2))
    for mine, theirs in zip(scaled, unscaled, strict=True):
        assert torch.equal(mine, theirs)

    before = list(objective.predictions(batch, 3))
    loss = float(objective.loss(batch, 0.0, generator()).loss.detach())
    objective.finish()
    for mine, theirs in zip(objective.predictions(batch, 3), before, strict=True):
        assert torch.equal(mine, theirs)
    assert float(objective.loss(batch, 0.0, generator()).loss.detach()) == pytest.approx(loss, rel=1e-5)
    plain = eagle3_objective(tiny_target, eagle3_settings(), module)
    for mine, theirs in zip(plain.predictions(batch, 3), before, strict=True):
        assert torch.equal(mine, theirs)


# --- EAGLE ---


def eagle_reference(target: Target, objective: EagleObjective, batch: Batch, vocabulary: Tensor) -> Tensor:
    """SmoothL1 of the next feature and cross-entropy of the next token, position by position."""
    predicted = objective._forward(batch.token_ids, batch.final, 0)
    total, weights = torch.zeros(()), 0.0
    for row, length in enumerate(batch.lengths.tolist()):
        for t in range(length - 2):
            feature = batch.final[row, t + 1]
            logits = feature @ target.lm_head_weight.T
            if not bool((vocabulary == logits.argmax()).any()):
                continue
            weight = 1.0 if batch.answer_mask[row, t + 2] else 0.5
            goal = logits.softmax(-1)[vocabulary]
            regression = F.smooth_l1_loss(predicted[row, t], feature)
            classification = F.cross_entropy(
                predicted[row, t] @ target.lm_head_weight[vocabulary].T, goal / goal.sum()
            )
            total = total + weight * (regression + 0.1 * classification)
            weights += weight
    return total / weights


def test_eagle_loss_equals_its_definition(tiny_target: Target) -> None:
    vocabulary = torch.arange(0, 320, 3)
    settings = eagle_settings(feature_noise=0.0, classification_weight=0.1)
    module = random_eagle(tiny_target)
    objective = EagleObjective(
        module, tiny_target.embed_weight, tiny_target.lm_head_weight, vocabulary, settings, 0.5
    )
    batch = sample_batch(tiny_target, 3, exact=True)
    terms = objective.loss(batch, 0.0, generator())
    torch.testing.assert_close(terms.loss, eagle_reference(tiny_target, objective, batch, vocabulary))
    terms.loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), f"{name} does not learn"


def test_feature_noise_comes_from_the_generator_and_stays_in_its_range(tiny_target: Target) -> None:
    module = random_eagle(tiny_target)
    vocabulary = torch.arange(320)
    batch = sample_batch(tiny_target, 2)
    seen: list[Tensor] = []

    class Watched(EagleObjective):
        def _forward(
            self,
            token_ids: Tensor,
            hidden: Tensor,
            step: int,
            keys: list[Tensor] | None = None,
            values: list[Tensor] | None = None,
        ) -> Tensor:
            seen.append(hidden - batch.final)
            return super()._forward(token_ids, hidden, step, keys, values)

    objective = Watched(
        module, tiny_target.embed_weight, tiny_target.lm_head_weight, vocabulary, eagle_settings(), 0.5
    )
    losses = [
        float(objective.loss(batch, 0.0, torch.Generator().manual_seed(seed)).loss.detach())
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    noise = seen[0]
    assert noise.abs().max() <= 0.1 + 1e-5
    assert noise.abs().max() > 0.09
    assert abs(float(noise.mean())) < 0.01
    list(objective.predictions(batch, 1))
    assert not seen[-1].any()  # none where it is judged
