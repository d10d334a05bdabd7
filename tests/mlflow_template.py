"""An empty MLflow database, made once for all tests and processes: its migrations take seconds."""

import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from eagle3.config import Settings
from eagle3.tracking import Tracker


def copy_database(factory: pytest.TempPathFactory, settings: Settings, folder: Path) -> None:
    """Put an empty database into a project's folder."""
    template = factory.getbasetemp().parent / "mlflow-template"
    template.mkdir(exist_ok=True)
    with FileLock(template / "made.lock"):
        if not (template / "made").exists():
            Tracker.open(settings, template)
            (template / "made").touch()
    shutil.copy(template / "mlflow.db", folder / "mlflow.db")
