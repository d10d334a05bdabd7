"""dvc.yaml says what each stage really depends on: nothing stale is kept, and nothing is done for nothing."""

import ast
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3 import paths
from eagle3.config import Settings, parse_settings
from eagle3.parameters import read_profile

ROOT = Path(__file__).parents[1]
PARAMS = read_profile("default", ROOT / "profiles")
SCRIPTS = sorted((ROOT / "experiments").glob("*.py"))

# What every stage uses and none depends on: these carry settings and results, and do not change them.
INFRASTRUCTURE = {
    ROOT / "eagle3" / f"{name}.py"
    for name in ("__init__", "parameters", "paths", "provenance", "sources", "tracking")
} | set((ROOT / "eagle3" / "config").glob("*.py"))


@cache
def stages() -> dict[str, dict[str, Any]]:
    """The stages as DVC makes them, with one stage a draft, and the studies; all run in the root folder."""
    raw = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    studies = yaml.safe_load((ROOT / "experiments" / "studies" / "dvc.yaml").read_text())["stages"]
    assert {stage["do"]["wdir"] for stage in studies.values()} == {"../.."}
    raw |= studies
    text = {name: stage for name, stage in raw.items() if "foreach" not in stage}
    for name, stage in raw.items():
        if "foreach" in stage:
            template = yaml.safe_dump(stage["do"])
            each = stage["foreach"]
            keys = each if isinstance(each, list) else PARAMS["drafts"]
            text |= {
                f"{name}@{key}": yaml.safe_load(template.replace("${key}", key).replace("${item}", key))
                for key in keys
            }
    return text


def listed_outputs(stage: dict[str, Any]) -> list[Any]:
    """What a stage makes, as dvc.yaml writes it: a path, or a mapping of a path to options."""
    return [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]


def outputs(stage: dict[str, Any]) -> set[str]:
    """The paths that a stage makes."""
    return {item if isinstance(item, str) else next(iter(item)) for item in listed_outputs(stage)}


def overlap(one: str, other: str) -> bool:
    """Whether two paths are the same, or one holds the other."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def upstream(name: str) -> set[str]:
    """All stages whose outputs a stage reads, directly or not."""
    found: set[str] = set()
    for other, stage in stages().items():
        for out in outputs(stage):
            if any(overlap(dep, out) for dep in stages()[name]["deps"]):
                found |= {other} | upstream(other)
    return found


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _executed(child)


def modules_of(script: Path) -> set[Path]:
    """The project's modules that a script imports, directly or through others, infrastructure left out."""
    found: set[Path] = set()
    queue = [script]
    while queue:
        for node in _executed(ast.parse(queue.pop().read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "eagle3":
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] == "eagle3"]
            for name in names:
                place = ROOT / name.replace(".", "/")
                for path in (place.with_suffix(".py"), place / "__init__.py"):
                    empty = (
                        path.name == "__init__.py" and path.is_file() and "import " not in path.read_text()
                    )
                    if path.is_file() and not empty and path not in found | INFRASTRUCTURE:
                        found.add(path)
                        queue.append(path)
    return found


@pytest.mark.parametrize("name", stages())
def test_parameters_exist(name: str) -> None:
    for key in stages()[name].get("params", []):
        value: Any = PARAMS
        for part in key.split("."):
            assert part in value, f"{name} depends on {key}, which params.yaml does not have"
            value = value[part]


def test_every_section_is_read_by_a_stage() -> None:
    """All but the tracking of runs, which changes no result, and sweep and servers, started by themselves."""
    read = {key.split(".")[0] for stage in stages().values() for key in stage.get("params", [])}
    assert read - {"sweep"} == set(Settings.model_fields) - {"tracking", "sweep", "serving"}


@pytest.mark.parametrize("name", stages())
def test_dependencies_exist_or_are_made_by_a_stage(name: str) -> None:
    made = {out for stage in stages().values() for out in outputs(stage)}
    for dep in stages()[name]["deps"]:
        assert any(overlap(dep, out) for out in made) or (ROOT / dep).exists(), dep


@pytest.mark.parametrize("name", stages())
def test_code_is_a_dependency(name: str) -> None:
    """A stage whose code changed runs again: every module that its script imports is a dependency."""
    script, *_ = (Path(word) for word in stages()[name]["cmd"].split() if word.endswith(".py"))
    deps = stages()[name]["deps"]
    assert str(script) in deps
    for module in modules_of(ROOT / script):
        place = module.relative_to(ROOT).as_posix()
        assert any(place == dep or place.startswith(dep + "/") for dep in deps), f"{name} imports {place}"
        if [file for file in module.parent.iterdir() if file.suffix not in (".py", "")]:
            assert module.parent.relative_to(ROOT).as_posix() in deps, f"{name} uses the files beside {place}"


def test_no_measurement_setting_trains_again() -> None:
    for name in (name for name in stages() if name.startswith("train@")):
        for stage in {name} | upstream(name):
            assert not any(key.startswith("evaluate") for key in stages()[stage].get("params", []))


def test_another_machine_measures_again_and_trains_nothing() -> None:
    assert stages()["fingerprint"]["always_changed"]
    assert "fingerprint" in upstream("evaluate")
    for name in stages():
        # The studies keep the drafts that they trained, and measure again.
        if name not in ("evaluate", "report", "fingerprint", "study@ablation", "study@scaling"):
            assert "fingerprint" not in upstream(name)


def test_one_draft_does_not_depend_on_another() -> None:
    for name in PARAMS["drafts"]:
        others = {f"drafts.{other}" for other in PARAMS["drafts"] if other != name}
        assert not others & set(stages()[f"train@{name}"]["params"])


def test_places_are_those_of_the_code() -> None:
    made = {out for stage in stages().values() for out in outputs(stage)}
    for place in (
        paths.TARGET,
        paths.PROMPTS,
        paths.TASKS,
        paths.REGENERATED,
        paths.VOCABULARY,
        paths.MACHINE,
    ):
        assert place.as_posix() in made
    assert {f"{paths.DRAFTS.as_posix()}/{name}" for name in PARAMS["drafts"]} <= made


def test_measurements_are_not_cached_by_dvc() -> None:
    """They are small, belong into git, and are read without DVC."""
    for stage in stages().values():
        for item in listed_outputs(stage):
            path, options = (item, {}) if isinstance(item, str) else next(iter(item.items()))
            if path.startswith("reports/"):
                assert options["cache"] is False


def run_script(script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a stage's script in this process; returns what it exits with."""
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    return caught.value.code


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.stem != "cli"], ids=lambda path: path.stem
)
def test_help_shows_defaults(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(script, ["--help"], monkeypatch) == 0
    assert "(default: " in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in stages() if name != "fingerprint"])
def test_refused_settings_start_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another section's mistake stops a stage as well: it would be found hours later otherwise."""
    params = tmp_path / "params.yaml"
    text = (ROOT / "profiles" / "default.yaml").read_text()
    params.write_text(text.replace("  max_new_tokens:", "  max_newtokens:"))
    script, *arguments = stages()[name]["cmd"].split()[1:]
    message = str(run_script(ROOT / script, [*arguments, "--params", str(params)], monkeypatch))
    assert "regenerate.max_newtokens: unknown key" in message
    assert "did you mean regenerate.max_new_tokens?" in message


@pytest.mark.parametrize("name", ["default", "full", "smoke"])
def test_report_says_which_profile_makes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "experiments")
    command_of = runpy.run_path("experiments/report.py", run_name="report")["command_of"]
    settings = parse_settings(read_profile(name, ROOT / "profiles"))
    expected = "make repro" if name == "default" else f"make profile NAME={name}\nmake repro"
    assert command_of(settings) == expected


def test_scripts_run_by_themselves(tmp_path: Path) -> None:
    """From a shell, with no installed copy of the project and no PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = ROOT / "experiments" / "fingerprint.py"
    options = ["--output", str(tmp_path / "machine.json"), "--params", str(ROOT / "params.yaml")]
    command = [sys.executable, str(script), *options]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert "cpu" in (tmp_path / "machine.json").read_text()
