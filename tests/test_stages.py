"""All stages, one after the other, on a tiny random target: what one writes, the next can read."""

import copy
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3 import paths
from eagle3.config import parse_settings
from eagle3.parameters import merge, read_profile
from eagle3.provenance import hash_tree, write_jsonl, write_yaml
from tests.mlflow_template import copy_database

ROOT = Path(__file__).parents[1]
TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}
SMALL: dict[str, Any] = {
    "prompts": {
        "self_generated": {"count": 0},
        "files": ["prompts.jsonl"],
        "validation_share": 0.3,
    },
    "tasks": {"names": [], "files": {"quiz": "question.jsonl"}},
    "regenerate": {
        "max_new_tokens": 12,
        "max_length": 96,
        "batch_size": 4,
        "group_size": 4,
        "dtype": "float32",
    },
    "vocabulary": {"size": 32},
    "train": {
        "token_budget": 600,
        "batch_tokens": 128,
        "max_length": 96,
        "validate_every": 3,
        "checkpoint_every": 2,
    },
    "drafts": {"eagle": {"num_key_value_heads": None}, "eagle3": {"num_key_value_heads": None}},
    "evaluate": {
        "tasks": ["quiz"],
        "prompts_per_task": 2,
        "max_new_tokens": 8,
        "temperatures": [0.0, 1.0],
        "repeats": 1,
        "methods": [
            {"name": "eagle", "draft": "eagle", "tree": TREE},
            {"name": "eagle3", "draft": "eagle3", "tree": TREE},
        ],
    },
    "sweep": {
        "tasks": ["quiz"],
        "prompts_per_task": 2,
        "max_new_tokens": 8,
        "space": {"max_num_steps": 3, "max_topk": 2, "max_num_draft_tokens": 6},
        "held_out": {"finalists": 1, "prompts_per_task": 2, "max_new_tokens": 8, "repeats": 1},
    },
}
THINGS = ["cat", "tree", "house", "river", "song", "book", "stone", "cloud", "road", "lamp", "ship", "star"]


class Project:
    """A workspace in the current folder whose stages can be run."""

    def __init__(self, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.params, self._monkeypatch = params, monkeypatch

    def run(self, stage: str, *arguments: str) -> None:
        """Run a stage's script in this process."""
        write_yaml(Path("params.yaml"), self.params)
        script = ROOT / "experiments" / f"{stage}.py"
        self._monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")


@pytest.fixture
def project(
    tiny_target_folder: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    """A project with a tiny target and a few prompts, up to the vocabulary stage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiments")
    for name in ("eagle3", "experiments", "dvc.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    params = merge(
        copy.deepcopy(read_profile("default", ROOT / "profiles")),
        merge(SMALL, {"target": {"source": str(tiny_target_folder), "file": None}}),
    )
    copy_database(tmp_path_factory, parse_settings(params), tmp_path)
    write_jsonl(Path("prompts.jsonl"), [{"prompt": f"Tell me what a {thing} is for."} for thing in THINGS])
    questions = [{"question_id": index, "turns": [f"Why {index}?", "And then?"]} for index in range(12)]
    write_jsonl(Path("question.jsonl"), questions)
    project = Project(params, monkeypatch)
    for stage in ("fingerprint", "target", "prompts", "regenerate", "vocabulary"):
        project.run(stage)
    return project


def test_from_target_to_report(project: Project) -> None:
    for draft in ("eagle", "eagle3"):
        project.run("train", draft)
    project.run("evaluate")
    project.run("report")
    evaluation = json.loads((paths.REPORTS / "evaluation.json").read_text())
    methods = ["vanilla", "vanilla-aa", "eagle", "eagle3"]
    assert list(dict.fromkeys(row["method"] for row in evaluation["results"])) == methods
    assert all(row["lossless"]["failures"] == 0 for row in evaluation["results"])
    assert set(json.loads(paths.METRICS.read_text())) == {*methods, *(f"{name}-t1" for name in methods)}
    assert "eagle3" in (paths.REPORTS / "index.html").read_text()
    assert not (paths.RUNS / "train" / "eagle3").exists()
    header = (paths.TRAINING / "eagle3.csv").read_text().splitlines()[0]
    assert header == "step,loss,lr,gradient_norm"


def test_the_same_again_is_the_same(project: Project) -> None:
    """Two runs on one machine end with equal files, or DVC would measure everything again."""

    def hashes() -> dict[str, str]:
        project.run("regenerate")
        project.run("train", "eagle3")
        made = (paths.REGENERATED, paths.HIDDEN_STATES, paths.DRAFTS, paths.TRAINING)
        return {str(place): hash_tree(place) for place in made}

    first = hashes()
    for place in (paths.REGENERATED, paths.HIDDEN_STATES, paths.DRAFTS):
        shutil.rmtree(place)
    assert hashes() == first


def test_captured_and_online_states_train_the_same_draft(project: Project) -> None:
    project.run("train", "eagle3")
    captured = (paths.TRAINING / "eagle3.csv").read_text()
    project.params["train"]["hidden_states"] = "online"
    project.run("train", "eagle3")
    assert (paths.TRAINING / "eagle3.csv").read_text() == captured


def test_unknown_draft_is_refused(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        project.run("train", "eagle4")
    assert "choose from eagle, eagle3" in capsys.readouterr().err
