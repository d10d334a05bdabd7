"""Measuring the experiments of params.yaml: what was finished stays, and what is missing is said first."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eagle3 import paths
from eagle3.config import Settings, parse_settings
from eagle3.models.target import Target
from eagle3.parameters import merge, read_profile
from eagle3.serving import experiments as module
from eagle3.serving.experiments import measure_engine
from eagle3.serving.load import answer_all
from eagle3.serving.results import with_earlier
from tests.data.served import Server, serving

ROOT = Path(__file__).parents[2]
VANILLA: dict[str, Any] = {"draft": None, "tree": None, "compile": False}
TREE = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}


@pytest.fixture
def server(tiny_target: Target) -> Iterator[Server]:
    with serving(tiny_target, "sglang") as running:
        yield running


@pytest.fixture
def settings(
    server: Server, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """Three vanilla experiments on a server that runs; nothing is prepared, and nothing is tracked."""
    monkeypatch.chdir(tmp_path)
    for folder in (paths.TARGET, paths.DRAFTS):
        folder.mkdir(parents=True)
    monkeypatch.setattr(module.Target, "load", lambda *_: tiny_target)
    monkeypatch.setattr(module, "_prompts", lambda *_: [("a", [5, 17, 60]), ("b", [7, 7, 12])])
    monkeypatch.setattr(module, "timing_lock", nullcontext)
    monkeypatch.setattr(module, "_track", lambda *_: None)
    names = ("vanilla", "second", "third")
    serving = {
        "concurrency": [1],
        "max_new_tokens": 6,
        "experiments": [
            *({"name": name, **VANILLA} for name in names),
            {"name": "drafted", "draft": "eagle3", "tree": TREE, "compile": False},
        ],
        "sglang": {"urls": dict.fromkeys(names, server.url)},
    }
    return parse_settings(merge(read_profile("default", ROOT / "profiles"), {"serving": serving}))


def written() -> dict[str, Any]:
    part: dict[str, Any] = json.loads(paths.SERVING.read_text())["sglang"]
    return part


def names(part: dict[str, Any]) -> list[str]:
    return [row["name"] for row in part["experiments"]]


def test_what_was_measured_before_an_interrupt_stays_and_the_rest_joins_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings.serving.experiments
    asked = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 2:  # the warm-up and the only level of the first
            raise KeyboardInterrupt
        return answer_all(*arguments, **options)

    paths.REPORTS.mkdir()
    paths.SERVING.write_text(json.dumps({"vllm": {"version": "1"}}))
    with monkeypatch.context() as patch:
        patch.setattr(module, "answer_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure_engine(settings, "sglang", chosen[:2], "cpu")
    assert names(written()) == ["vanilla"]
    assert written()["tokens_equal"]
    first = written()["experiments"][0]
    measure_engine(settings, "sglang", chosen[1:3], "cpu")
    assert names(written()) == ["vanilla", "second", "third"]
    assert written()["experiments"][0] == first
    assert json.loads(paths.SERVING.read_text())["vllm"] == {"version": "1"}


def test_a_missing_draft_is_said_before_anything_is_asked(settings: Settings, server: Server) -> None:
    with pytest.raises(ValueError, match=r"eagle3: no draft there .*experiments/train\.py"):
        measure_engine(settings, "sglang", settings.serving.experiments, "cpu")
    assert not server.seen


def part(**changes: Any) -> dict[str, Any]:
    row = {
        "draft": "eagle3",
        "levels": [],
        "agreement": {"tokens_equal": True, "acceptance_equal": True},
    }
    values = {
        "version": "1",
        "dtype": "float32",
        "machine": {"cpu": "x"},
        "hidden_state_difference": None,
        "experiments": [{"name": "new", **row}],
        "origin": {"options": {}, "environment": [], "target": "t", "drafts": {"eagle3": "d"}},
    }
    return merge(copy.deepcopy(values), changes)


def test_rows_measured_otherwise_are_not_kept() -> None:
    row = part()["experiments"][0]
    unequal = {**row, "name": "old", "agreement": {"tokens_equal": False, "acceptance_equal": False}}
    earlier = part(experiments=[unequal, row], hidden_state_difference=1e-6)
    both = with_earlier(part(), earlier)
    assert names(both) == ["old", "new"]
    assert (both["tokens_equal"], both["hidden_states_equal"]) == (False, True)
    for changes in ({"version": "2"}, {"machine": {"cpu": "y"}}, {"origin": {"options": {"a": 1}}}):
        alone = with_earlier(part(**changes), earlier)
        assert names(alone) == ["new"]
        assert (alone["tokens_equal"], alone["hidden_states_equal"]) == (True, None)
    trained_again = with_earlier(part(origin={"drafts": {"eagle3": "e"}}), earlier)
    assert names(trained_again) == ["new"]
    assert trained_again["hidden_states_equal"] is None
