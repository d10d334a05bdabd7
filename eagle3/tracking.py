"""MLflow, and the only module that knows it: it mirrors what the stages write as JSON, Parquet and weights.

An experiment a stage (``<experiment>/train``, ...), a run an execution; an evaluation is a parent run with
one child a method, whose metrics have equal names, so that selecting them in the browser compares them.
"""

import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from filelock import FileLock
from ruamel.yaml import YAML

from eagle3.config import Settings, TrackingSettings
from eagle3.parameters import flatten
from eagle3.provenance import fingerprint_code, fingerprint_machine, hash_tree, short_hash

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Limits of MLflow's REST interface: entries of one batch, and characters of a parameter on old servers.
_METRICS_A_BATCH = 1000
_PARAMS_A_BATCH = 100
_PARAM_CHARACTERS = 500


def project_root() -> Path:
    """The user's project: DVC_ROOT where DVC runs the stage, because it points out of a temporary copy."""
    return Path(os.environ.get("DVC_ROOT") or ".").resolve()


def tracking_uri(settings: TrackingSettings, root: Path | None = None) -> str:
    """Where runs are stored: the configured URI, or mlflow.db in the project's folder."""
    return settings.uri or f"sqlite:///{(root or project_root()).resolve() / 'mlflow.db'}"


@dataclass(frozen=True)
class TrackedRun:
    """A run that can be written to; all methods may be called any number of times."""

    client: "MlflowClient"
    run_id: str

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log nested values under dotted names; a longer value than MLflow takes is cut and ends in "..."."""
        from mlflow.entities import Param

        params = [Param(key, _param_text(value)) for key, value in flatten(values).items()]
        for start in range(0, len(params), _PARAMS_A_BATCH):
            self.client.log_batch(self.run_id, params=params[start : start + _PARAMS_A_BATCH])

    def log_metrics(self, values: Mapping[str, float | None], step: int = 0) -> None:
        """Log one value a metric; None (not measured) is left out."""
        self.log_history([{"step": step, **values}])

    def log_history(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Log rows such as ``{"step": 10, "loss": 2.1, ...}``, many in one call; only numbers are logged."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(key, float(value), now, int(row["step"]))
            for row in rows
            for key, value in flatten(row).items()
            if key != "step" and isinstance(value, int | float)
        ]
        for start in range(0, len(metrics), _METRICS_A_BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_A_BATCH])

    @contextmanager
    def metric_buffer(self, every: int = 20) -> Iterator[Callable[[Mapping[str, float], int], None]]:
        """Yield a function that takes (values, step) and logs ``every`` steps in one call, the last ones too.

        A call a step would cost a database transaction a step, which short training steps would notice.
        """
        rows: list[Mapping[str, float]] = []

        def add(values: Mapping[str, float], step: int) -> None:
            rows.append({"step": step, **values})
            if len(rows) >= every:
                self.log_history(rows)
                rows.clear()

        try:
            yield add
        finally:
            self.log_history(rows)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log_dataset(self, name: str, path: Path, context: str) -> None:
        """Record which data a run read: the name, the place and the sha256 of a file or folder."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        # The digest's column holds 36 characters; the whole of it is in the source.
        digest = hash_tree(path)
        source = json.dumps({"path": path.as_posix(), "sha256": digest})
        dataset = Dataset(name=name, digest=digest[:36], source_type="local", source=source)
        tag = InputTag("mlflow.data.context", context)
        self.client.log_inputs(self.run_id, datasets=[DatasetInput(dataset, [tag])])

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, or a folder with all that is in it, into the run's artifacts."""
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), folder or path.name)
        elif path.is_file():
            self.client.log_artifact(self.run_id, str(path), folder)
        else:
            raise ValueError(f"artifact {path} does not exist; the stage that writes it did not finish")


@dataclass(frozen=True)
class Tracker:
    """Opens runs for the stages of one project."""

    client: "MlflowClient"
    settings: Settings
    root: Path
    uri: str

    @classmethod
    def open(cls, settings: Settings, root: Path | None = None) -> "Tracker":
        """Connect to the configured store; a new database is made by one process at a time."""
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before the first import of mlflow
        from mlflow import MlflowClient

        root = (root or project_root()).resolve()
        uri = tracking_uri(settings.tracking, root)
        with _store_lock(uri):
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
        return cls(client, settings, root, uri)

    @contextmanager
    def run(
        self, stage: str, name: str, parent: TrackedRun | None = None, method: str | None = None
    ) -> Iterator[TrackedRun]:
        """A new run of a stage: FINISHED at the end of the block, FAILED or KILLED where an error leaves it.

        ``method`` tags what was trained or measured. Runs of processes that died are closed as KILLED first.
        """
        experiment = self._experiment(stage)
        if parent is None:
            self._close_abandoned(experiment)
        created = self.client.create_run(experiment, run_name=name, tags=self._tags(stage, parent, method))
        run = TrackedRun(self.client, created.info.run_id)
        status = "FAILED"
        try:
            if parent is None:
                run.log_params(self.settings.model_dump(mode="json"))
                self.client.log_text(run.run_id, _as_yaml(self.settings), "params.yaml")
                if Path("dvc.lock").is_file():
                    run.log_artifact(Path("dvc.lock"))
            yield run
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            self.client.set_terminated(run.run_id, status)

    def _experiment(self, stage: str) -> str:
        """The id of the stage's experiment, made if missing; two processes that race get the same one."""
        from mlflow.exceptions import MlflowException

        name = f"{self.settings.tracking.experiment}/{stage}"
        location = (self.root / "mlartifacts").as_uri() if self.uri.startswith("sqlite:") else None
        with _store_lock(self.uri):
            found = self.client.get_experiment_by_name(name)
            if found is None:
                try:
                    return self.client.create_experiment(name, artifact_location=location)
                except MlflowException:
                    # On a server another machine may have been faster; if it was not, the error stands.
                    found = self.client.get_experiment_by_name(name)
                    if found is None:
                        raise
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
        experiment_id: str = found.experiment_id
        return experiment_id

    def _tags(self, stage: str, parent: TrackedRun | None, method: str | None) -> dict[str, str]:
        code = fingerprint_code(Path.cwd())
        tags = {
            "mlflow.source.name": f"experiments/{stage}.py",
            "mlflow.source.git.commit": code["commit"],
            "git.commit": code["commit"],
            "git.dirty": str(code["dirty"]).lower(),
            "git.diff_sha256": code["diff_sha256"],
            "params.hash": short_hash(self.settings.model_dump(mode="json")),
            "machine.fingerprint": short_hash(fingerprint_machine()),
            "stage": stage,
            "process": _process_mark(os.getpid()),
        }
        if method is not None:
            tags["method"] = method
        if parent is not None:
            tags["mlflow.parentRunId"] = parent.run_id
        return tags

    def _close_abandoned(self, experiment_id: str) -> None:
        """A killed process leaves its run RUNNING for ever: close those of this host that have ended."""
        for run in self.client.search_runs([experiment_id], "attributes.status = 'RUNNING'"):
            mark = run.data.tags.get("process", "")
            number, _, rest = mark.partition("@")
            here = rest.partition("@")[2] == platform.node()
            if here and mark != _process_mark(int(number)):
                self.client.set_terminated(run.info.run_id, "KILLED")


def _process_mark(pid: int) -> str:
    """A process by number, start time (numbers are used again) and host; "" when it does not live."""
    try:
        return f"{pid}@{psutil.Process(pid).create_time():.0f}@{platform.node()}"
    except psutil.NoSuchProcess:
        return ""


def _as_yaml(settings: Settings) -> str:
    """The settings of a run, wherever they were read from."""
    stream = io.StringIO()
    YAML().dump(settings.model_dump(mode="json"), stream)
    return stream.getvalue()


@contextmanager
def _store_lock(uri: str) -> Iterator[None]:
    """One process at a time creates the tables of a local database; a server looks after itself."""
    path = uri.removeprefix("sqlite:///")
    if path == uri:
        yield
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield


def _param_text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _PARAM_CHARACTERS else text[: _PARAM_CHARACTERS - 3] + "..."
