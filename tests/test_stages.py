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
        "wheels": [],
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
    "drafts": {
        "eagle": {"num_key_value_heads": None},
        "eagle3": {"num_key_value_heads": None},
        "small": {"layers": [0, 7]},
    },
    "evaluate": {
        "tasks": ["quiz"],
        "prompts_per_task": 2,
        "max_new_tokens": 8,
        "temperatures": [0.0, 1.0],
        "repeats": 1,
        "methods": [
            {"name": "speculative-sampling", "drafter": "model", "draft": "small", "num_steps": 2},
            {
                "name": "prompt-lookup",
                "drafter": "prompt-lookup",
                "num_steps": 3,
                "min_ngram": 1,
                "max_ngram": 2,
            },
            {
                "name": "eagle",
                "drafter": "static-head",
                "draft": "eagle",
                "paths": [[0], [1], [0, 0]],
                "backend": "kernels",
            },
            {"name": "eagle3", "drafter": "head", "draft": "eagle3", "tree": TREE, "backend": "kernels"},
            {"name": "eagle3-adaptive", "drafter": "adaptive-head", "draft": "eagle3", "tree": TREE},
        ],
    },
    "studies": {
        "ablation": {"train_tokens": 150, "token_budget": 200},
        "scaling": {"train_tokens": [60, 120, 180, 240], "epochs": 1.0},
        "evaluate": {"tasks": ["quiz"], "prompts_per_task": 2, "max_new_tokens": 8, "tree": TREE},
    },
    "serving": {"tasks": ["quiz"]},
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
    for stage in ("fingerprint", "inputs", "target", "prompts", "regenerate", "vocabulary"):
        project.run(stage)
    return project


def test_a_changed_prompt_file_changes_what_dvc_looks_at(project: Project) -> None:
    before = paths.INPUTS.read_text()
    assert set(json.loads(before)) == {"prompts.files.0", "tasks.files.quiz", "target.source"}
    project.run("inputs")
    assert paths.INPUTS.read_text() == before
    project.params["prompts"]["files"] = ["prompts.jsonl#100"]  # the first 100 of the same file
    project.run("inputs")
    assert paths.INPUTS.read_text() == before
    with Path("prompts.jsonl").open("a") as stream:
        stream.write(json.dumps({"prompt": "One more."}) + "\n")
    project.run("inputs")
    assert paths.INPUTS.read_text() != before
    Path("prompts.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"prompts\.files\.0: prompts\.jsonl does not exist"):
        project.run("inputs")


def test_a_draft_from_elsewhere_is_taken_and_measured(project: Project, tmp_path: Path) -> None:
    project.run("train", "eagle3")
    theirs = tmp_path / "theirs"
    shutil.move(paths.DRAFTS / "eagle3", theirs)
    (theirs / "manifest.json").unlink()
    project.params["drafts"]["theirs"] = {"family": "external", "source": str(theirs)}
    method = {"name": "theirs", "drafter": "head", "draft": "theirs", "tree": TREE, "backend": "kernels"}
    project.params["evaluate"]["methods"] = [method]
    project.run("train", "theirs")
    project.run("evaluate")
    project.run("report")
    results = json.loads((paths.REPORTS / "evaluation.json").read_text())["results"]
    assert all(row["lossless"]["failures"] == 0 for row in results if row["method"] == "theirs")
    project.run("inputs")
    seen = {path.stem: path.read_text() for path in paths.DRAFT_INPUTS.iterdir()}
    assert set(seen) == set(project.params["drafts"])
    (theirs / "model.safetensors").unlink()
    project.run("inputs")
    after = {path.stem: path.read_text() for path in paths.DRAFT_INPUTS.iterdir()}
    assert {name for name in seen if seen[name] != after[name]} == {"theirs"}
    with pytest.raises(SystemExit, match=r"drafts\.theirs: .*model\.safetensors is missing"):
        project.run("train", "theirs")


def test_studies(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Every variant is trained once and measured; small amounts of data are part of larger ones."""
    for study in ("ablation", "scaling"):
        project.run("study", study)
        first = json.loads((paths.REPORTS / f"{study}.json").read_text())
        assert all(row["lossless"]["failures"] == 0 for row in first["results"])
        capsys.readouterr()
        project.run("study", study)
        said = capsys.readouterr().out
        assert "trained before" in said
        assert "training on" not in said
    ablation = json.loads((paths.REPORTS / "ablation.json").read_text())["results"]
    names = ["eagle3", *project.params["studies"]["ablation"]["variants"]]
    assert [row["method"] for row in ablation if row["task"] == "all"] == names
    scaling = json.loads((paths.REPORTS / "scaling.json").read_text())["results"]
    tokens: dict[str, list[int]] = {name: [] for name in ("eagle", "eagle3")}
    for row in scaling:
        if row["task"] == "all":
            tokens[row["method"]].append(row["train_tokens"])
    assert tokens["eagle"] == tokens["eagle3"] == sorted(set(tokens["eagle"]))
    for amount, wanted in zip(tokens["eagle"], (60, 120, 180, 240), strict=True):
        assert wanted <= amount < wanted + 100, "up to one row more than asked for"


def test_from_target_to_report(project: Project) -> None:
    for draft in ("eagle", "eagle3", "small"):
        project.run("train", draft)
    project.run("evaluate")
    project.run("report")
    evaluation = json.loads((paths.REPORTS / "evaluation.json").read_text())
    named = [method["name"] for method in project.params["evaluate"]["methods"]]
    methods = ["vanilla", "vanilla-aa", *named]
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
    assert "choose from eagle, small, eagle3" in capsys.readouterr().err
