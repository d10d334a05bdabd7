"""Every command in README.md exists, and the slow test runs them all, one after the other, at smoke size."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from eagle3.parameters import read_yaml

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def commands() -> list[str]:
    """The lines of all bash blocks, comments and continuations resolved."""
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" # ")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def inline_commands() -> list[str]:
    """Commands inside of sentences, each once."""
    found = re.findall(r"`((?:make|python|dvc|torchrun) [^`]+)`", README.read_text(encoding="utf-8"))
    return list(dict.fromkeys(" ".join(command.split()) for command in found))


def words(command: str) -> list[str]:
    """The words of a command, without variables set before it."""
    found = shlex.split(command)
    while found and re.fullmatch(r"[A-Z_0-9]+=.*", found[0]):
        found.pop(0)
    return found


def make_targets() -> set[str]:
    """The targets that the Makefile explains."""
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_readme_has_commands() -> None:
    """Without blocks of this form, the other tests here would pass on anything."""
    assert "make repro" in commands()
    assert "make smoke" in inline_commands()


@pytest.mark.parametrize("command", list(dict.fromkeys([*commands(), *inline_commands()])))
def test_command_exists(command: str) -> None:
    program, *arguments = words(command)
    if program == "make":
        assert {word for word in arguments if "=" not in word} <= make_targets()
    elif program in ("python", "torchrun"):
        script = next(word for word in arguments if word.endswith(".py"))
        assert (ROOT / script).is_file()
        options = [
            word.partition("=")[0] for word in arguments[arguments.index(script) :] if word[:2] == "--"
        ]
        shown = subprocess.run(
            [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert not [option for option in options if option not in shown]
    else:
        assert program in ("git", "cd", "dvc", "mlflow", "source"), f"no test knows the command {command!r}"


@pytest.mark.slow
def test_all_commands_run(tmp_path: Path) -> None:
    """In a copy of the project whose profiles are all as small as the smoke profile."""
    workspace = tmp_path / "project"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in names:
        if (ROOT / name).is_file() and name != "dvc.lock" and not name.startswith("reports/"):
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, workspace / name)
    (workspace / ".venv").symlink_to(ROOT / ".venv")
    smoke = (workspace / "profiles" / "smoke.yaml").read_text()
    for profile in (workspace / "profiles").glob("*.yaml"):
        # Profiles that name another model stay as they are: only this target needs no network.
        names_model = "source" in read_yaml(profile).get("target", {})
        if profile.stem not in ("default", "smoke") and not names_model:
            profile.write_text(smoke)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for step in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "copy"]):
        subprocess.run(["git", *step], cwd=workspace, check=True)
    environment = {
        **os.environ,
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "DVC_NO_ANALYTICS": "1",
    }
    subprocess.run([sys.executable, "experiments/apply_profile.py", "smoke"], cwd=workspace, check=True)
    for command in commands():
        if words(command)[0] in ("git", "cd", "source"):
            continue
        if "test-serving" in command or "serving.py" in command:
            continue  # these need the engines' environments: tests/serving/test_real_engines.py runs them
        if words(command)[:2] == ["make", "ui"]:
            _answers_and_stops(command, workspace, environment)
        else:
            subprocess.run(command, shell=True, cwd=workspace, env=environment, check=True)


def _answers_and_stops(command: str, workspace: Path, environment: dict[str, str]) -> None:
    """Start the user interface, wait until it answers, and end it."""
    port = "50123"
    process = subprocess.Popen(
        [*words(command), f"PORT={port}"], cwd=workspace, env=environment, process_group=0
    )
    try:
        for _ in range(120):
            assert process.poll() is None, f"{command} ended by itself"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
                    assert answer.status == 200
                    return
            except urllib.error.URLError:
                time.sleep(1)
        raise AssertionError(f"{command} did not answer within two minutes")
    finally:
        os.killpg(process.pid, 15)
        process.wait()
