"""The environment is made once, whole, and from pinned versions."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pinned() -> dict[str, str]:
    """Version by normalised name, of every line of constraints.txt that is no comment."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalised(name): version for name, version in pairs}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def planned(project: Path, target: str) -> str:
    """The commands that make would run."""
    done = subprocess.run(["make", "-n", target], cwd=project, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        Requirement(text) for text in declared["dependencies"] + declared["optional-dependencies"]["dev"]
    ]
    versions = pinned()
    for requirement in wanted:
        assert requirement.specifier.contains(versions[normalised(requirement.name)]), requirement


def test_pins_name_versions_only() -> None:
    """A path, an address or a local version such as +cpu exists on one machine only."""
    for version in pinned().values():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), version


@pytest.mark.parametrize("target", ["repro", "smoke", "test", "lint", "ui", "profile"])
def test_first_call_sets_up_and_second_does_not(project: Path, target: str) -> None:
    assert "pip install" in planned(project, target)
    (project / ".venv").mkdir()
    (project / ".venv" / ".ready").touch()
    assert "pip install" not in planned(project, target)
    later = (project / ".venv" / ".ready").stat().st_mtime + 10
    os.utime(project / "constraints.txt", (later, later))
    assert "pip install" in planned(project, target)


def test_help_lists_every_target(project: Path) -> None:
    shown = subprocess.run(["make", "help"], cwd=project, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None
    for target in phony[1].split():
        assert f"make {target} " in shown
