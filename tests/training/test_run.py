"""What a training starts from: what is missing is said, and the target runs only where a batch needs it."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3 import paths
from eagle3.config import parse_settings
from eagle3.data.hidden_states import RowStates
from eagle3.data.rows import MANIFEST, Row, write_rows
from eagle3.data.vocabulary import build_vocabulary, count_tokens, hash_tokenizer, save_vocabulary
from eagle3.models.target import Target, TargetOutput
from eagle3.parameters import merge, read_profile, write_profile
from eagle3.provenance import write_json
from eagle3.training.batches import make_batch
from eagle3.training.run import TrainingData

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace, in which no stage has run."""
    monkeypatch.chdir(tmp_path)
    write_profile("default", Path("params.yaml"), ROOT / "profiles")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["regenerate"],
            r"data/prompts/train\.jsonl: no training prompts there; run python experiments/prompts\.py",
        ),
        (["vocabulary"], r"data/regenerated: no finished regeneration .* experiments/regenerate\.py"),
        (["train", "eagle3"], r"data/regenerated: no finished regeneration .* experiments/regenerate\.py"),
    ],
    ids=["regenerate", "vocabulary", "train"],
)
def test_a_stage_run_alone_says_what_is_missing_and_what_makes_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    script = ROOT / "experiments" / f"{words[0]}.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), *words[1:]])
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(script), run_name="__main__")


def test_online_the_target_runs_when_a_batch_is_made_once_a_row(
    project: Path,
    tiny_target: Target,
    tiny_target_folder: Path,
    rows: list[Row],
    states: Callable[[Row], RowStates],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first step of a large target it would be hours, for every draft and after every kill."""
    shutil.copytree(tiny_target_folder, paths.TARGET)
    write_rows(paths.REGENERATED, 0, [replace(row, target_argmax=()) for row in rows])
    write_json(paths.REGENERATED / MANIFEST, {"data_hash": "abc"})
    counts = count_tokens([row.token_ids for row in rows], tiny_target.vocab_size)
    tokenizer = hash_tokenizer(tiny_target.tokenizer)
    vocabulary = build_vocabulary(counts, 32, tiny_target.eos_token_ids, tokenizer, "abc")
    save_vocabulary(vocabulary, paths.VOCABULARY)
    online = merge(read_profile("default", ROOT / "profiles"), {"train": {"hidden_states": "online"}})

    lengths: list[int] = []
    forward = Target.forward

    def watched(self: Target, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> TargetOutput:
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids, *arguments, **options)

    monkeypatch.setattr(Target, "forward", watched)
    data = TrainingData.load(parse_settings(online), "cpu")
    assert not lengths
    batch = make_batch(data.rows[:3], data.states, data.target.hidden_size)
    assert lengths == [len(row.token_ids) - 1 for row in rows[:3]]
    captured = make_batch(rows[:3], states, tiny_target.hidden_size)
    assert torch.equal(batch.target_argmax, captured.target_argmax)
    torch.testing.assert_close(batch.captured, captured.captured)
