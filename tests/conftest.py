"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.measure import lock
from eagle3.models.target import Target
from tests.tiny import save_tiny_target


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors lose more to thread hand-over than they win, and tests may run side by side."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_timing_lock(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests that evaluate run side by side, and beside a user's own evaluation."""
    monkeypatch.setattr(lock, "TIMING_LOCK", tmp_path_factory.getbasetemp() / "timing.lock")


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target with tokenizer and chat template, as a Hugging Face folder; read only."""
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_target(tiny_target_folder: Path) -> Target:
    """The tiny target, loaded in fp32."""
    return Target.load(tiny_target_folder)
