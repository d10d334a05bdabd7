"""A training that was killed, anywhere, ends as one that was not; one that was changed starts over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.training.trainer import METRICS
from tests.training.samples import train_settings
from tests.training.trainings import Finished, Killed, Training, assert_equal_weights, metrics, objective_of


def test_the_uninterrupted_training(
    uninterrupted: Finished,
) -> None:
    """What the kills below are compared with: long enough, and every step is recorded once."""
    result, _, recorded = uninterrupted
    assert result.steps >= 12
    assert [line["step"] for line in recorded] == list(range(1, result.steps + 1))
    assert {"loss", "lr", "gradient_norm", "tokens", "accuracy/depth_0"} <= recorded[0].keys()
    assert "accuracy/depth_1" not in recorded[0]
    assert "accuracy/depth_1" in recorded[-1]
    validated = [line["step"] for line in recorded if "acceptance_length" in line]
    assert validated == sorted({*range(4, result.steps + 1, 4), result.steps})


@pytest.mark.parametrize("kills", [[1], [3], [4], [7], [2, 5, 6, 11]], ids=str)
def test_killed_and_resumed_training_ends_with_equal_weights_and_metrics(
    training: Training,
    uninterrupted: Finished,
    tmp_path: Path,
    kills: list[int],
) -> None:
    """A checkpoint every third step: kills fall before, on and after one, and after a validation."""
    for at in kills:
        training.kill(tmp_path, at)
    result, weights = training.run(tmp_path)
    assert result == uninterrupted[0]
    assert_equal_weights(weights, uninterrupted[1])
    assert metrics(tmp_path) == uninterrupted[2]


@pytest.mark.parametrize(("family", "optimizer"), [("eagle3", "muon"), ("eagle", "adamw"), ("eagle", "muon")])
def test_other_drafts_and_optimizers_resume_exactly_too(
    training: Training, tmp_path: Path, family: str, optimizer: str
) -> None:
    """EAGLE draws feature noise; Muon has a state of its own."""
    settings = train_settings(optimizer=optimizer, token_budget=900)

    def options() -> dict[str, Any]:
        return {"settings": settings, "objective": objective_of(training.target, family)}

    whole, expected = training.run(tmp_path / "whole", **options())
    training.kill(tmp_path / "killed", 5, **options())
    result, weights = training.run(tmp_path / "killed", **options())
    assert result == whole
    assert_equal_weights(weights, expected)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_a_kill_while_the_checkpoint_is_written_costs_the_steps_since_the_last(
    training: Training,
    uninterrupted: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save, calls = torch.save, []

    def killed(state: dict[str, Any], path: Path) -> None:
        calls.append(state["step"])
        if state["step"] == 6:
            Path(path).write_bytes(b"half a check")
            raise Killed
        save(state, path)

    monkeypatch.setattr(torch, "save", killed)
    trainer, _ = training.trainer(tmp_path)
    with pytest.raises(Killed):
        trainer.run()
    assert calls == [3, 6]
    monkeypatch.undo()
    result, weights = training.run(tmp_path)
    assert result == uninterrupted[0]
    assert_equal_weights(weights, uninterrupted[1])
    assert metrics(tmp_path) == uninterrupted[2]


def test_half_a_line_of_metrics_is_dropped(
    training: Training, uninterrupted: Finished, tmp_path: Path
) -> None:
    training.kill(tmp_path, 7)
    with (tmp_path / METRICS).open("a") as stream:
        stream.write('{"step": 8, "loss": 3.')
    training.run(tmp_path)
    assert metrics(tmp_path) == uninterrupted[2]


def test_a_finished_training_is_not_trained_again(
    training: Training, uninterrupted: Finished, tmp_path: Path
) -> None:
    """It says only, to the run that was started, which step was best."""
    training.run(tmp_path)
    logged: list[tuple[dict[str, float], int]] = []
    result, weights = training.run(tmp_path, logged=logged)
    best = {"best_step": result.best_step, "best_acceptance_length": result.acceptance_length}
    assert logged == [(best, result.steps)]
    assert result == uninterrupted[0]
    assert_equal_weights(weights, uninterrupted[1])


def test_a_training_resumed_near_its_end_is_not_judged_on_its_last_steps_alone(
    training: Training, uninterrupted: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few batches of long prompts may have hardly a supervised token; all steps together have."""
    training.kill(tmp_path, uninterrupted[0].steps - 1)
    objective = objective_of(training.target)
    loss = objective.loss
    monkeypatch.setattr(objective, "loss", lambda *arguments: replace(loss(*arguments), supervised=0))
    result, weights = training.run(tmp_path, objective=objective)
    assert result == uninterrupted[0]
    assert_equal_weights(weights, uninterrupted[1])


@pytest.mark.parametrize(
    "changes",
    [{"settings": train_settings(lr=2e-3, token_budget=800)}, {"seed": 2}, {"identity": {"data": "abd"}}],
    ids=["settings", "seed", "data"],
)
def test_a_checkpoint_of_another_training_is_not_used(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    changes = {"settings": train_settings(token_budget=800), **changes}
    training.kill(tmp_path / "reused", 7, settings=train_settings(token_budget=800))
    result, weights = training.run(tmp_path / "reused", **changes)
    assert "starting over" in capsys.readouterr().out
    expected, fresh = training.run(tmp_path / "fresh", **changes)
    assert result == expected
    assert_equal_weights(weights, fresh)
    assert metrics(tmp_path / "reused") == metrics(tmp_path / "fresh")


def test_going_back_to_earlier_settings_leaves_no_gap_in_the_metrics(
    training: Training, uninterrupted: Finished, tmp_path: Path
) -> None:
    """The other training removed the metrics; its predecessor's checkpoint must not be found without them."""
    training.kill(tmp_path, 7)
    training.kill(tmp_path, 1, seed=2)
    training.run(tmp_path)
    assert metrics(tmp_path) == uninterrupted[2]


def test_the_seed_decides_order_and_result(training: Training, tmp_path: Path) -> None:
    short = train_settings(token_budget=400)
    runs = [
        training.run(tmp_path / str(number), settings=short, seed=seed)[1]
        for number, seed in enumerate((1, 1, 2))
    ]
    assert_equal_weights(runs[0], runs[1])
    assert not torch.equal(runs[0]["fc.weight"], runs[2]["fc.weight"])
