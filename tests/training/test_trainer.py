"""The trainer: clear stops, a kept plan, and the best weights by simulated acceptance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.data.hidden_states import OnlineStates, RowStates
from eagle3.data.rows import HiddenStates, Row, write_hidden_states
from eagle3.models.target import Target
from eagle3.training import trainer as trainer_module
from eagle3.training.acceptance import SimulatedAcceptance
from eagle3.training.batches import Batch
from eagle3.training.objective import Eagle3Objective, LossTerms
from eagle3.training.trainer import STATE, Trainer, describe
from tests.training.samples import eagle3_settings, train_settings
from tests.training.trainings import (
    Finished,
    Objective,
    Training,
    assert_equal_weights,
    metrics,
    objective_of,
)

# --- stops ---


class Spoiled:
    """The EAGLE-3 objective, with the loss of one step replaced."""

    def __init__(self, target: Target, at: int, spoil: Callable[[Tensor, torch.nn.Module], Tensor]) -> None:
        self._inner = objective_of(target)
        self.module = self._inner.module
        self._at, self._spoil, self.calls = at, spoil, 0

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        terms = self._inner.loss(batch, progress, generator)
        self.calls += 1
        if self.calls - 1 != self._at:
            return terms
        return replace(terms, loss=self._spoil(terms.loss, self.module))

    def predictions(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        return self._inner.predictions(batch, depth)

    def finish(self) -> None:
        self._inner.finish()


SPOILERS: dict[str, tuple[Callable[[Tensor, torch.nn.Module], Tensor], str]] = {
    "nan": (lambda loss, module: loss * float("nan"), "step 4: loss nan"),
    "infinity": (lambda loss, module: loss * float("inf"), "step 4: loss inf"),
    # sqrt at zero: the loss is finite, its gradient is not.
    "gradient": (
        lambda loss, module: loss + (next(module.parameters()).flatten()[0] * 0).abs().sqrt(),
        r"step 4: loss \d.*, gradient norm (nan|inf)",
    ),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_loss_or_gradient_that_is_not_finite_stops_with_the_step(
    training: Training,
    uninterrupted: Finished,
    tmp_path: Path,
    name: str,
) -> None:
    spoil, message = SPOILERS[name]
    spoiled: Any = Spoiled(training.target, 4, spoil)
    trainer, _ = training.trainer(tmp_path, objective=spoiled)
    with pytest.raises(ValueError, match=message) as stopped:
        trainer.run()
    assert "last checkpoint is intact" in str(stopped.value)
    assert "lower train.lr" in str(stopped.value)
    assert all(bool(parameter.isfinite().all()) for parameter in spoiled.module.parameters())
    # The checkpoint really is intact: a training without the fault goes on from it.
    result, weights = training.run(tmp_path)
    assert result == uninterrupted[0]
    assert_equal_weights(weights, uninterrupted[1])


def test_a_vocabulary_that_does_not_belong_to_the_data_stops_the_training(
    training: Training, tmp_path: Path
) -> None:
    """No choice of the target can be drafted: the loss would be zero all the way."""
    objective = objective_of(training.target)
    assert isinstance(objective, Eagle3Objective)
    chosen = {token for row in training.rows for token in row.target_argmax}
    never = [token for token in range(320) if token not in chosen][:100]
    objective.module.set_vocabulary(torch.tensor(never))
    objective._goal_head = training.target.lm_head_weight[objective.module.draft_to_target]
    trainer, _ = training.trainer(tmp_path, objective=objective)
    with pytest.raises(
        ValueError, match=r"step \d: 0 of \d+ tokens were supervised so far; check that the draft vocab"
    ):
        trainer.run()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_training_without_rows_of_a_split_is_refused(training: Training, tmp_path: Path, split: str) -> None:
    rows = [row for row in training.rows if row.split != split]
    with pytest.raises(
        ValueError, match=r"both are needed; raise train\.max_length or prompts\.validation_share"
    ):
        Training(training.target, rows, training.states).trainer(tmp_path)


# --- plan ---


def test_the_token_budget_is_kept_to_within_a_batch(training: Training, tmp_path: Path) -> None:
    result, _ = training.run(tmp_path, settings=train_settings(token_budget=700))
    assert 700 <= result.tokens < 700 + 96


def test_rows_longer_than_the_limit_are_left_out(training: Training, tmp_path: Path) -> None:
    seen: set[str] = set()
    known = training.states

    def watched(row: Row) -> RowStates:
        seen.add(row.id)
        return known(row)

    Training(training.target, training.rows, watched).run(tmp_path, settings=train_settings(max_length=24))
    lengths = {row.id: len(row.token_ids) for row in training.rows}
    assert max(lengths.values()) > 24
    assert max(lengths[row_id] for row_id in seen) <= 24


def test_validation_rows_are_not_trained_on(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trainer_module, "simulate_acceptance", lambda *_: SimulatedAcceptance((0.0,) * 4, 1.0)
    )
    seen: set[str] = set()

    def watched(row: Row) -> RowStates:
        seen.add(row.id)
        return training.states(row)

    Training(training.target, training.rows, watched).run(tmp_path)
    assert seen == {row.id for row in training.rows if row.split == "train"}


# --- which weights are kept ---


def scripted_validation(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> list[dict[str, Tensor]]:
    """Let the validations give these lengths; returns the weights that each of them judged."""
    judged: list[dict[str, Tensor]] = []

    def simulate(objective: Objective, batches: Iterator[Batch], depth: int) -> SimulatedAcceptance:
        judged.append({name: value.clone() for name, value in objective.module.state_dict().items()})
        length = lengths[len(judged) - 1]
        return SimulatedAcceptance((length / 10,) * depth, length)

    monkeypatch.setattr(trainer_module, "simulate_acceptance", simulate)
    return judged


def eagle_of(training: Training) -> dict[str, Any]:
    """EAGLE's objective, whose weights are stored as they are trained."""
    return {"objective": objective_of(training.target, "eagle")}


def test_the_weights_with_the_longest_simulated_acceptance_are_kept(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the last ones, nor those with the lowest loss: acceptance peaks before the loss does."""
    lengths = [1.0, 1.8, 1.2, 1.8, *[1.1] * 20]
    judged = scripted_validation(monkeypatch, lengths)
    result, weights = training.run(tmp_path, **eagle_of(training))
    assert len(judged) >= 4
    assert (result.best_step, result.acceptance_length) == (8, 1.8)
    assert result.conditional_acceptance == (0.18,) * 4
    assert_equal_weights(weights, judged[1])
    assert not torch.equal(weights["fc.weight"], judged[-1]["fc.weight"])


def test_the_best_weights_survive_a_kill(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = scripted_validation(monkeypatch, [1.8, *[1.1] * 20])
    training.kill(tmp_path, 9, **eagle_of(training))
    result, weights = training.run(tmp_path, **eagle_of(training))
    assert result.best_step == 4
    assert_equal_weights(weights, judged[0])


def test_validation_judges_averaged_weights(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average starts at the first weights and moves by 1 - min(ema, (s + 1) / (s + 10)) at step s."""
    judged = scripted_validation(monkeypatch, [1.0 + number / 100 for number in range(30)])
    options = eagle_of(training)
    name = "fc.weight"
    trajectory = [options["objective"].module.fc.weight.detach().clone()]
    original = Trainer._average_weights

    def watched(self: Trainer) -> None:
        trajectory.append(self._objective.module.fc.weight.detach().clone())  # type: ignore[union-attr, operator]
        original(self)

    monkeypatch.setattr(Trainer, "_average_weights", watched)
    training.run(tmp_path, settings=train_settings(ema=0.3), **options)
    average, expected = trajectory[0], []
    for step, weights in enumerate(trajectory[1:]):
        decay = min(0.3, (step + 1) / (step + 10))
        average = decay * average + (1 - decay) * weights
        expected.append(average)
    assert len(judged) >= 3
    for number, weights in enumerate(judged):
        step = min(4 * (number + 1), len(expected))
        torch.testing.assert_close(weights[name], expected[step - 1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected[-1], trajectory[-1])


def test_how_often_it_validates_does_not_change_what_is_trained(training: Training, tmp_path: Path) -> None:
    """Validation puts the averaged weights into the module for a moment; training goes on with its own."""
    trained = []
    for every in (1, 1000):
        folder = tmp_path / str(every)
        training.run(folder, settings=train_settings(validate_every=every, token_budget=700))
        trained.append(torch.load(folder / STATE, weights_only=True))
    assert_equal_weights(trained[0]["module"], trained[1]["module"])
    assert_equal_weights(trained[0]["average"], trained[1]["average"])


def test_without_averaging_the_trained_weights_are_judged(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = scripted_validation(monkeypatch, [1.0 + number / 100 for number in range(30)])
    options = eagle_of(training)
    training.run(tmp_path, settings=train_settings(ema=0.0), **options)
    state = torch.load(tmp_path / STATE, weights_only=True)
    torch.testing.assert_close(judged[-1]["fc.weight"], state["module"]["fc.weight"])


def test_a_scale_is_folded_into_the_weights_that_are_returned(training: Training, tmp_path: Path) -> None:
    _, weights = training.run(tmp_path)
    state = torch.load(tmp_path / STATE, weights_only=True)
    torch.testing.assert_close(weights["fc.weight"] * torch.linspace(0.5, 2, 96), state["best"]["fc.weight"])


def test_training_learns(training: Training, tmp_path: Path) -> None:
    """On rows seen many times the loss falls clearly and drafts get accepted."""
    settings = train_settings(token_budget=12_000, lr=5e-3, ema=0.5, validate_every=40, checkpoint_every=1000)
    rows = [*training.rows, *(Row(**{**vars(row), "split": "validation"}) for row in training.rows[:4])]
    result, _ = Training(training.target, rows, training.states).run(tmp_path, settings=settings)
    recorded = metrics(tmp_path)
    assert recorded[-1]["loss"] < 0.8 * recorded[0]["loss"]
    first = next(line["acceptance_length"] for line in recorded if "acceptance_length" in line)
    assert result.acceptance_length > max(first, 1.05)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_products_in_bfloat16_train_as_those_in_float32_do(
    training: Training, tmp_path: Path, family: str
) -> None:
    """Rounded products, not rounded weights: steps as small as the schedule's first ones must not be lost."""
    last: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        settings = train_settings(dtype=dtype)
        objective = objective_of(training.target, family)
        _, weights = training.run(tmp_path / dtype, settings=settings, objective=objective)
        assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}
        state = torch.load(tmp_path / dtype / STATE, weights_only=True)
        assert state["optimizers"][0]["state"][0]["exp_avg"].dtype == torch.float32
        last[dtype] = metrics(tmp_path / dtype)[-1]
    assert last["bfloat16"]["loss"] != last["float32"]["loss"], "bfloat16 was asked for and not used"
    assert last["bfloat16"]["loss"] == pytest.approx(last["float32"]["loss"], rel=0.01)
    assert last["bfloat16"]["gradient_norm"] == pytest.approx(last["float32"]["gradient_norm"], rel=0.1)


# --- hidden states from two sources ---


def test_online_and_captured_hidden_states_give_the_same_training(
    training: Training, uninterrupted: Finished, tmp_path: Path
) -> None:
    """Captured ones with what regeneration keeps, online ones without it."""
    online = OnlineStates(training.target)
    for shard, part in enumerate((training.rows[:10], training.rows[10:])):
        write_hidden_states(
            tmp_path / "hidden", shard, [row.id for row in part], [online(row).hidden for row in part]
        )
    captured = HiddenStates(tmp_path / "hidden")
    bare = [replace(row, target_argmax=()) for row in training.rows]

    def stored(row: Row) -> RowStates:
        return RowStates(captured[row.id], torch.tensor(row.target_argmax))

    trainings = {
        "online": Training(training.target, bare, online),
        "captured": Training(training.target, training.rows, stored),
    }
    for name, by_source in trainings.items():
        result, weights = by_source.run(tmp_path / name)
        assert result == uninterrupted[0]
        assert_equal_weights(weights, uninterrupted[1])
        assert metrics(tmp_path / name) == uninterrupted[2]


# --- what is reported ---


def test_every_step_is_logged_with_its_speed(training: Training, tmp_path: Path) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    result, _ = training.run(tmp_path, logged=logged, settings=train_settings(token_budget=400))
    best, last = logged.pop()
    assert last == result.steps
    assert best == {"best_step": result.best_step, "best_acceptance_length": result.acceptance_length}
    assert [step for _, step in logged] == list(range(1, result.steps + 1))
    for measured, _ in logged:
        assert all(math.isfinite(value) for value in measured.values())
        assert measured["tokens_per_second"] > 0
    assert logged[-1][0]["tokens"] == result.tokens
    assert {f"acceptance/depth_{depth}" for depth in range(4)} <= logged[-1][0].keys()


def test_the_loss_of_every_depth_is_recorded(uninterrupted: Finished) -> None:
    """They add up to the loss, each weighed by its decay."""
    decay = eagle3_settings().step_decay
    for line in uninterrupted[2]:
        losses = [line[key] for key in (f"losses/depth_{depth}" for depth in range(3)) if key in line]
        assert len(losses) == len([key for key in line if key.startswith("accuracy/depth_")])
        weights = [decay**depth for depth in range(len(losses))]
        mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        assert line["loss"] == pytest.approx(mean, rel=1e-5)
    assert "losses/depth_1" in uninterrupted[2][-1]


def test_describe_is_json(uninterrupted: Finished) -> None:
    described = json.loads(json.dumps(describe(uninterrupted[0])))
    assert described.keys() == {"steps", "tokens", "best_step", "acceptance_length", "conditional_acceptance"}
