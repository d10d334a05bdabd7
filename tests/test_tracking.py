"""What is logged can be found again: histories, parameters of any length, data digests, runs to compare."""

import json
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3.config import Settings, parse_settings
from eagle3.parameters import read_profile, read_yaml
from eagle3.provenance import sha256_file
from eagle3.tracking import Tracker, tracking_uri
from tests.mlflow_template import copy_database

PROFILES = Path(__file__).parents[1] / "profiles"


@pytest.fixture(scope="session")
def settings() -> Settings:
    return parse_settings(read_profile("default", PROFILES))


@pytest.fixture
def root(
    tmp_path_factory: pytest.TempPathFactory,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A project with an empty database, as the current folder."""
    copy_database(tmp_path_factory, settings, tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tracker(root: Path, settings: Settings) -> Tracker:
    return Tracker.open(settings, root)


def test_history_keeps_every_step(tracker: Tracker) -> None:
    """More rows than MLflow takes in one call; what is no number is no metric."""
    rows = [{"step": step, "loss": step / 2, "accuracy": {"0": 0.5}, "note": "text"} for step in range(1200)]
    with tracker.run("train", "eagle3") as run:
        run.log_history(rows)
        run.log_metrics({"tau": 1.5, "unmeasured": None})
    history = tracker.client.get_metric_history(run.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(row["step"], row["loss"]) for row in rows]
    data = tracker.client.get_run(run.run_id).data
    assert set(data.metrics) == {"loss", "accuracy.0", "tau"}


def test_buffered_metrics_arrive_even_after_an_error(tracker: Tracker) -> None:
    with (
        pytest.raises(RuntimeError),
        tracker.run("train", "eagle3") as run,
        run.metric_buffer(every=2) as log,
    ):
        for step in range(5):
            log({"loss": float(step)}, step)
        raise RuntimeError
    history = tracker.client.get_metric_history(run.run_id, "loss")
    assert [point.step for point in history] == [0, 1, 2, 3, 4]


def test_settings_are_flattened_and_long_values_cut(tracker: Tracker, settings: Settings) -> None:
    with tracker.run("train", "eagle3") as run:
        run.log_params({"many": {"tokens": list(range(1000))}, "more": {str(key): key for key in range(150)}})
    params = tracker.client.get_run(run.run_id).data.params
    assert params["train.lr"] == str(settings.train.lr)
    assert params["evaluate.methods.0.draft"] == "small"
    assert len(params["many.tokens"]) == 500
    assert params["many.tokens"].endswith("...")
    assert params["more.149"] == "149"


def test_methods_of_one_evaluation_can_be_compared(tracker: Tracker) -> None:
    with tracker.run("evaluate", "evaluation") as parent:
        for method, tau in (("vanilla", 1.0), ("eagle", 1.5), ("eagle3", 2.0)):
            with tracker.run("evaluate", method, parent=parent, method=method) as child:
                child.log_metrics({"tau": tau})
    experiment = tracker.client.get_experiment_by_name("eagle3/evaluate")
    assert experiment is not None
    children = tracker.client.search_runs(
        [experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'", order_by=["metrics.tau"]
    )
    assert [(run.data.tags["method"], run.data.metrics["tau"]) for run in children] == [
        ("vanilla", 1.0),
        ("eagle", 1.5),
        ("eagle3", 2.0),
    ]
    assert {run.info.status for run in children} == {"FINISHED"}


def test_run_says_what_made_it(tracker: Tracker, root: Path) -> None:
    (root / "dvc.lock").write_text("schema: '2.0'\n")
    (root / "drafts").mkdir()
    (root / "drafts" / "config.json").write_text("{}")
    (root / "rows.jsonl").write_text("{}\n")
    with tracker.run("train", "eagle3", method="eagle3") as run:
        run.log_dataset("regenerated", root / "rows.jsonl", "training")
        run.log_artifact(root / "drafts", "checkpoint")
        run.log_artifact(root / "rows.jsonl")
        run.log_tags({"verdict": "good"})
    found = tracker.client.get_run(run.run_id)
    needed = {
        "git.commit",
        "git.dirty",
        "git.diff_sha256",
        "params.hash",
        "machine.fingerprint",
        "method",
        "stage",
    }
    assert needed <= set(found.data.tags)
    assert found.data.tags["verdict"] == "good"
    assert found.inputs is not None
    (dataset,) = found.inputs.dataset_inputs
    assert json.loads(dataset.dataset.source)["sha256"] == sha256_file(root / "rows.jsonl")
    artifacts = {file.path for file in tracker.client.list_artifacts(run.run_id)}
    assert artifacts == {"params.yaml", "dvc.lock", "rows.jsonl", "checkpoint"}
    assert str(root / "mlartifacts") in found.info.artifact_uri


def test_missing_artifact_is_an_error(tracker: Tracker, root: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"), tracker.run("train", "eagle3") as run:
        run.log_artifact(root / "nothing")
    assert tracker.client.get_run(run.run_id).info.status == "FAILED"


def test_interrupted_run_is_killed(tracker: Tracker) -> None:
    with pytest.raises(KeyboardInterrupt), tracker.run("train", "eagle3") as run:
        raise KeyboardInterrupt
    assert tracker.client.get_run(run.run_id).info.status == "KILLED"


def test_run_of_a_dead_process_is_closed_and_that_of_a_live_one_is_not(tracker: Tracker) -> None:
    with tracker.run("train", "live") as live:
        with tracker.run("train", "dead") as dead:
            pass
        with tracker.run("train", "elsewhere") as elsewhere:
            pass
        for run, host in ((dead, platform.node()), (elsewhere, "another.host")):
            tracker.client.update_run(run.run_id, status="RUNNING")
            # Process 1 lives, but started another time; of another host nothing is known.
            tracker.client.set_tag(run.run_id, "process", f"1@12345@{host}")
        with tracker.run("train", "next"):
            assert tracker.client.get_run(dead.run_id).info.status == "KILLED"
            assert tracker.client.get_run(live.run_id).info.status == "RUNNING"
            assert tracker.client.get_run(elsewhere.run_id).info.status == "RUNNING"


def test_the_settings_that_a_run_had_are_its_artifact(tracker: Tracker, settings: Settings) -> None:
    """Not params.yaml in the folder, which says something else: a script takes any file with --params."""
    with tracker.run("train", "eagle3") as run:
        pass
    path = tracker.client.download_artifacts(run.run_id, "params.yaml")
    assert parse_settings(read_yaml(Path(path))) == settings


def test_racing_processes_share_one_experiment(root: Path, settings: Settings) -> None:
    """The loser of the race must not log to the Default experiment."""

    def train(index: int) -> str:
        tracker = Tracker.open(settings, root)
        with tracker.run("train", f"draft {index}") as run:
            return str(tracker.client.get_run(run.run_id).info.experiment_id)

    with ThreadPoolExecutor(4) as pool:
        experiments = set(pool.map(train, range(4)))
    assert len(experiments) == 1
    assert experiments != {"0"}


def test_deleted_experiment_is_restored(tracker: Tracker) -> None:
    with tracker.run("train", "one"):
        pass
    experiment = tracker.client.get_experiment_by_name("eagle3/train")
    assert experiment is not None
    tracker.client.delete_experiment(experiment.experiment_id)
    with tracker.run("train", "two") as run:
        pass
    assert tracker.client.get_run(run.run_id).info.experiment_id == experiment.experiment_id


def test_database_is_the_projects_own_even_in_a_temporary_copy(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert tracking_uri(settings.tracking) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "original"))
    assert tracking_uri(settings.tracking) == f"sqlite:///{tmp_path / 'original' / 'mlflow.db'}"
    server = settings.tracking.model_copy(update={"uri": "http://localhost:5000"})
    assert tracking_uri(server) == "http://localhost:5000"
