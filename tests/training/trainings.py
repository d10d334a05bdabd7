"""Trainings on the rows of a tiny target, which can be killed at a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.config import TrainSettings
from eagle3.data.hidden_states import RowStates
from eagle3.data.rows import Row
from eagle3.models.target import Target
from eagle3.training.objective import Eagle3Objective, EagleObjective
from eagle3.training.parallel import ALONE, Processes
from eagle3.training.trainer import METRICS, Trainer, TrainingResult
from tests.models.drafts import random_eagle, random_eagle3
from tests.training.samples import eagle3_settings, eagle_settings, train_settings

Objective = Eagle3Objective | EagleObjective
# Result, weights and what was recorded.
Finished = tuple[TrainingResult, dict[str, Tensor], list[dict[str, float]]]
PHASES = ({"from_share": 0.0, "steps": 1}, {"from_share": 0.5, "steps": 2})


def objective_of(target: Target, family: str = "eagle3") -> Objective:
    """A draft at its start, always the same."""
    if family == "eagle":
        vocabulary = torch.arange(0, 320, 2)
        return EagleObjective(
            random_eagle(target),
            target.embed_weight,
            target.lm_head_weight,
            vocabulary,
            eagle_settings(),
            0.5,
        )
    return Eagle3Objective(
        random_eagle3(target),
        target.embed_weight,
        target.lm_head_weight,
        eagle3_settings(test_time=PHASES),
        0.5,
        torch.linspace(0.5, 2, 96),
    )


class Killed(BaseException):
    """A kill: nothing catches it."""


class Training:
    """Trainings on the same rows, each in the folder it is given."""

    def __init__(self, target: Target, rows: list[Row], states: Callable[[Row], RowStates]) -> None:
        self.target, self.rows, self.states = target, rows, states

    def trainer(
        self,
        folder: Path,
        settings: TrainSettings | None = None,
        objective: Objective | None = None,
        kill_at: int | None = None,
        seed: int = 1,
        identity: dict[str, Any] | None = None,
        logged: list[tuple[dict[str, float], int]] | None = None,
        processes: Processes = ALONE,
    ) -> tuple[Trainer, Objective]:
        """A trainer that is killed when it records step `kill_at`."""
        objective = objective or objective_of(self.target)

        def log(measured: dict[str, float], step: int) -> None:
            if logged is not None:
                logged.append((measured, step))
            if step == kill_at:
                raise Killed

        trainer = Trainer(
            objective,
            settings or train_settings(),
            self.rows,
            self.states,
            self.target.hidden_size,
            seed,
            folder,
            identity or {"data": "abc"},
            log,
            processes,
        )
        return trainer, objective

    def run(self, folder: Path, **options: Any) -> tuple[TrainingResult, dict[str, Tensor]]:
        trainer, objective = self.trainer(folder, **options)
        result = trainer.run()
        return result, {name: value.clone() for name, value in objective.module.state_dict().items()}

    def kill(self, folder: Path, at: int, **options: Any) -> None:
        trainer, _ = self.trainer(folder, kill_at=at, **options)
        with pytest.raises(Killed):
            trainer.run()


def metrics(folder: Path) -> list[dict[str, float]]:
    """What was recorded, without the speed."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def assert_equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
