"""The whole sweep on a tiny random target and draft: trials, resumption, held-out rows, files, MLflow."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from eagle3 import paths
from eagle3.config import parse_settings
from eagle3.models.checkpoint import save_draft
from eagle3.models.target import Target
from eagle3.parameters import merge, read_profile
from eagle3.provenance import write_jsonl, write_yaml
from eagle3.tuning.best import read_best
from eagle3.tuning.results import held_out_results
from eagle3.tuning.runner import Runner
from eagle3.tuning.setup import fingerprint
from tests.mlflow_template import copy_database
from tests.models.drafts import random_eagle3

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "tasks": {"names": [], "files": {"quiz": "question.jsonl"}},
    "serving": {"tasks": ["quiz"]},
    "evaluate": {
        "tasks": ["quiz"],
        "threads": 1,
        "draft_dtype": "float32",
        "methods": [
            {
                "name": "eagle3",
                "drafter": "head",
                "draft": "eagle3",
                "tree": {"num_steps": 2, "topk": 1, "num_draft_tokens": 3},
                "backend": "kernels",
            }
        ],
    },
    "studies": {"evaluate": {"tasks": ["quiz"]}},
    "sweep": {
        "tasks": ["quiz"],
        "prompts_per_task": 2,
        "max_new_tokens": 6,
        "space": {
            "max_num_steps": 3,
            "max_topk": 2,
            "max_num_draft_tokens": 6,
            "draft_dtypes": ["float32"],
        },
        "held_out": {"finalists": 1, "prompts_per_task": 2, "max_new_tokens": 6, "repeats": 1},
    },
}
RunSweep = Callable[..., None]


@pytest.fixture
def run_sweep(
    tiny_target_folder: Path,
    tiny_target: Target,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> RunSweep:
    """A project with target, draft and tasks; the returned function runs the script in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiments")
    paths.TARGET.parent.mkdir()
    paths.TARGET.symlink_to(tiny_target_folder)
    save_draft(paths.DRAFTS / "eagle3", random_eagle3(tiny_target), tiny_target, {"data": "abc"})
    rows = [
        {"id": f"{split}-{index}", "task": "quiz", "split": split, "turns": [f"Why {index}?"]}
        for split in ("tuning", "held_out")
        for index in range(3)
    ]
    write_jsonl(paths.TASKS / "quiz.jsonl", rows)
    params = merge(read_profile("default", ROOT / "profiles"), SMALL)
    write_yaml(Path("params.yaml"), params)
    copy_database(tmp_path_factory, parse_settings(params), tmp_path)

    def run(*arguments: str) -> None:
        script = ROOT / "experiments" / "sweep.py"
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")

    return run


def results() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((paths.REPORTS / "sweep.json").read_text())
    return values


def test_from_nothing_to_best_parameters(
    run_sweep: RunSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep("--dry-run")
    plan = capsys.readouterr().out
    # 3 chains; 1/2 to 3 tokens, 2/2 to 6, 3/2 to 6: 2 + 4 + 3 trees.
    assert "12 feasible configurations, 3 of them chains" in plan
    assert "measured so far: 0 of 50" in plan
    assert not (paths.RUNS / "sweep.db").exists()

    # Stopped by hand in the third trial ...
    report = Runner._report
    monkeypatch.setattr(Runner, "_report", stop_after(2))
    with pytest.raises(SystemExit, match="the same command goes on"):
        run_sweep("--trials", "4")
    assert len(results()["trials"]) == 2
    assert results()["held_out"] == []

    # ... the same command goes on, and ends with the winner on held-out prompts.
    monkeypatch.setattr(Runner, "_report", report)
    run_sweep("--trials", "4")
    said = capsys.readouterr().out
    found = results()
    measured = [trial for trial in found["trials"] if trial["seconds"] is not None]
    assert len(measured) == 4
    assert {trial["state"] for trial in measured} <= {"complete", "pruned"}
    assert all(trial["different_outputs"] == 0 for trial in measured)
    assert [trial["source"] for trial in measured[:3]] == ["vanilla-like", "chain", "eagle3 of params.yaml"]
    rows = found["held_out"]
    assert [row["tuned"] for row in rows].count(True) == 1
    assert {"name", "tuned", "speedup", "speedup_low", "speedup_high", "tau"} <= set(rows[0])
    assert rows == sorted(rows, key=lambda row: -row["speedup"])
    assert all(row["lossless_failures"] == 0 for row in rows)
    assert found["summary"] in said
    assert len((paths.REPORTS / "sweep_predictions.csv").read_text().splitlines()) == 1 + 12

    best = yaml.safe_load((paths.REPORTS / "best_params.yaml").read_text())
    assert best["name"] == rows[0]["name"]
    assert best["sglang"] in said
    assert "--speculative-algorithm EAGLE3" in best["sglang"]
    settings = parse_settings(yaml.safe_load(Path("params.yaml").read_text()))
    assert read_best(paths.REPORTS / "best_params.yaml", fingerprint(settings)).name == best["name"]

    check_runs()
    run_sweep("--what-if", "20", "1")
    assert "with 20 ms a target forward and 1 ms a draft step" in capsys.readouterr().out

    # More trials that are stopped by hand take no held-out row away: best_params.yaml stays as well.
    monkeypatch.setattr(Runner, "_report", stop_after(1))
    with pytest.raises(SystemExit, match="the same command goes on"):
        run_sweep("--trials", "6")
    assert len(results()["trials"]) > len(found["trials"])
    assert results()["held_out"] == rows
    assert results()["summary"] == found["summary"]


def stop_after(count: int) -> Callable[[Runner, int, float], None]:
    """`Runner._report`, interrupted after so many trials."""
    report, ended = Runner._report, list[int]()

    def report_and_stop(self: Runner, number: int, seconds: float) -> None:
        report(self, number, seconds)
        ended.append(number)
        if len(ended) == count:
            raise KeyboardInterrupt

    return report_and_stop


def check_runs() -> None:
    """One run a sweep's execution, with a nested run a trial and one a held-out row."""
    client = MlflowClient(tracking_uri=f"sqlite:///{Path('mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("eagle3/sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = {run.info.run_id: run for run in runs if "mlflow.parentRunId" not in run.data.tags}
    nested = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert all(run.data.tags["mlflow.parentRunId"] in parents for run in nested)
    held_out = [run for run in nested if run.info.run_name.startswith("held out: ")]
    assert {run.info.run_name for run in held_out} == {
        f"held out: {row['name']}" for row in results()["held_out"]
    }
    assert all("speedup" in run.data.metrics for run in held_out)
    children = [run for run in nested if run not in held_out]
    assert {run.info.status for run in parents.values()} == {"KILLED", "FINISHED"}
    assert len(children) == 4
    for child in children:
        assert child.data.tags["state"] in ("complete", "pruned")
        assert {"num_steps", "topk", "num_draft_tokens"} <= set(child.data.params)
        assert {"tau", "round_ms.verify"} <= set(child.data.metrics)
    [finished] = [run for run in parents.values() if run.info.status == "FINISHED"]
    assert "held_out.speedup" in finished.data.metrics
    artifacts = {item.path for item in client.list_artifacts(finished.info.run_id)}
    assert {"sweep.json", "best_params.yaml", "figures"} <= artifacts


def test_other_draft_is_refused_with_the_way_out(
    run_sweep: RunSweep, tiny_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep("--trials", "3", "--sampler", "grid")
    run_sweep("--what-if", "20", "1")
    assert "other conditions" not in capsys.readouterr().out
    save_draft(paths.DRAFTS / "eagle3", random_eagle3(tiny_target, seed=1), tiny_target, {"data": "abc"})
    with pytest.raises(SystemExit, match=r"drafts\.eagle3 was .* --study"):
        run_sweep("--trials", "4")
    # What only looks says so, too, and what it shows instead.
    capsys.readouterr()
    run_sweep("--dry-run")
    said = capsys.readouterr().out
    assert "drafts.eagle3 was" in said
    assert "--study <name>" in said
    assert "measured so far: 0 of 50" in said
    run_sweep("--what-if", "20", "1")
    said = capsys.readouterr().out
    assert "drafts.eagle3 was" in said
    assert "predicted from that study all the same" in said
    run_sweep("--trials", "1", "--study", "second")


def test_another_study_has_no_held_out_rows_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    kept = {"study": "tree", "held_out": [{"name": "3/1/4"}], "summary": "s", "reservations": ["few"]}
    path.write_text(json.dumps({**kept, "identity": {"sizes": [1]}}))
    nothing: dict[str, Any] = {"held_out": [], "summary": None, "reservations": []}
    assert held_out_results(path, "tree", {"sizes": (1,)}, None) == kept
    assert held_out_results(path, "tree", {"sizes": (2,)}, None) == {"study": "tree", **nothing}
    assert held_out_results(path, "other", {"sizes": (1,)}, None) == {"study": "other", **nothing}
    assert held_out_results(tmp_path / "none.json", "tree", {}, None) == {"study": "tree", **nothing}


def test_batches_are_a_study_of_their_own(run_sweep: RunSweep) -> None:
    """Vanilla decodes in the same batches; the study of one request is another."""
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["sweep"]["batch_size"] = 2
    write_yaml(Path("params.yaml"), params)
    run_sweep("--trials", "2")
    found = results()
    assert found["identity"]["batch_size"] == 2
    assert all(trial["different_outputs"] == 0 for trial in found["trials"] if trial["seconds"] is not None)
    assert yaml.safe_load(paths.BEST.read_text())["fingerprint"]["batch_size"] == 2
    params["sweep"]["batch_size"] = 1
    write_yaml(Path("params.yaml"), params)
    with pytest.raises(SystemExit, match="batch_size"):
        run_sweep("--trials", "2")


def test_what_if_without_trials_says_what_to_do(run_sweep: RunSweep) -> None:
    with pytest.raises(SystemExit, match="run at least three trials first"):
        run_sweep("--what-if", "20", "1")
