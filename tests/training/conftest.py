"""Fixtures of the trainer's tests: one set of rows, and one training that nothing interrupted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eagle3.data.hidden_states import OnlineStates, RowStates
from eagle3.data.rows import Row
from eagle3.models.target import Target
from tests.training.samples import sample_rows
from tests.training.trainings import Finished, Training, metrics


@pytest.fixture(scope="session")
def rows(tiny_target: Target) -> list[Row]:
    return sample_rows(tiny_target)


@pytest.fixture(scope="session")
def states(tiny_target: Target, rows: list[Row]) -> Callable[[Row], RowStates]:
    """Computed once, as from shards."""
    known = {row.id: OnlineStates(tiny_target)(row) for row in rows}
    return lambda row: known[row.id]


@pytest.fixture(scope="session")
def training(tiny_target: Target, rows: list[Row], states: Callable[[Row], RowStates]) -> Training:
    return Training(tiny_target, rows, states)


@pytest.fixture(scope="session")
def uninterrupted(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("uninterrupted")
    result, weights = training.run(folder)
    return result, weights, metrics(folder)
