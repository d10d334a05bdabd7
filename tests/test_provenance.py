"""Fingerprints change when what they stand for changes, and only then; files are whole or absent."""

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3 import provenance
from eagle3.provenance import (
    fingerprint_code,
    fingerprint_machine,
    hash_object,
    hash_tree,
    script_command,
    without_password,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with one commit."""
    (tmp_path / "a.py").write_text("a = 1\n")
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    provenance.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        provenance.write_json(path, {"a": float("nan")})
    with pytest.raises(RuntimeError), provenance.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}
    assert [item.name for item in path.parent.iterdir()] == ["value.json"]


def test_equal_rows_are_equal_parquet_files(tmp_path: Path) -> None:
    """DVC compares bytes: a time or a name inside the file would measure everything again."""
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    provenance.write_parquet(tmp_path / "1.parquet", frame)
    provenance.write_parquet(tmp_path / "2.parquet", frame.copy())
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "1.parquet"), frame)


def test_jsonl_and_yaml_can_be_read_again(tmp_path: Path) -> None:
    provenance.write_jsonl(tmp_path / "rows.jsonl", [{"τ": 1}, {"τ": 2}])
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [
        {"τ": 1},
        {"τ": 2},
    ]
    provenance.write_yaml(tmp_path / "a.yaml", {"b": 1, "a": [2]})
    assert (tmp_path / "a.yaml").read_text() == "b: 1\na:\n- 2\n"


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=4))
def test_hash_of_an_object_ignores_the_order_of_keys(value: dict[str, object]) -> None:
    assert hash_object(value) == hash_object(dict(reversed(value.items())))
    assert hash_object(value) != hash_object({**value, "more": 1, "and": 2})


def test_hash_of_a_folder_sees_contents_and_names_only(tmp_path: Path) -> None:
    (tmp_path / "one" / "sub").mkdir(parents=True)
    (tmp_path / "two" / "sub").mkdir(parents=True)
    for name in ("b", "sub/a"):
        (tmp_path / "one" / name).write_text(name)
    for name in ("sub/a", "b"):  # the other order
        (tmp_path / "two" / name).write_text(name)
    before = hash_tree(tmp_path / "one")
    assert before == hash_tree(tmp_path / "two")
    (tmp_path / "two" / "b").rename(tmp_path / "two" / "c")
    assert before != hash_tree(tmp_path / "two")
    with pytest.raises(ValueError, match="nothing to hash"):
        hash_tree(tmp_path / "three")


def test_machine_fingerprint_is_stable_and_sees_a_changed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint_machine()
    assert first == fingerprint_machine()
    assert first["cpu"]
    assert first["usable_cores"] >= 1
    monkeypatch.setattr(provenance.importlib.metadata, "version", lambda name: "0.0")
    assert fingerprint_machine() != first


def test_machine_fingerprint_sees_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_machine()
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda _: set(range(97)), raising=False)
    after = fingerprint_machine()
    assert after["usable_cores"] == 97
    assert {**after, "usable_cores": before["usable_cores"]} == before


def test_code_fingerprint_of_a_clean_tree(repository: Path) -> None:
    code = fingerprint_code(repository)
    assert len(code["commit"]) == 40
    assert code["dirty"] is False
    assert code["diff_sha256"] == ""


def test_code_fingerprint_sees_edits_and_new_files(repository: Path) -> None:
    """A module nobody added to git is part of what ran."""
    (repository / "a.py").write_text("a = 2\n")
    edited = fingerprint_code(repository)
    (repository / "b.py").write_text("b = 1\n")
    added = fingerprint_code(repository)
    (repository / "b.py").write_text("b = 2\n")
    changed = fingerprint_code(repository)
    assert edited["dirty"]
    assert len({edited["diff_sha256"], added["diff_sha256"], changed["diff_sha256"]}) == 3


def test_what_the_pipeline_writes_makes_no_tree_dirty(repository: Path) -> None:
    """Stages run in turn: what the first wrote must not make the code look changed to the second."""
    (repository / "reports").mkdir()
    for name in ("reports/evaluation.json", "dvc.lock", "params.yaml"):
        (repository / name).write_text("{}")
    assert fingerprint_code(repository)["dirty"] is False
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    assert fingerprint_code(repository)["dirty"] is False


def test_code_outside_of_git_claims_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert fingerprint_code(tmp_path) == {"commit": "unknown", "dirty": True, "diff_sha256": ""}


def test_a_recorded_command_tells_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:s3cret@host:5432/db"
    monkeypatch.setattr("sys.argv", ["sweep.py", "--storage", url, f"--x={url}"])
    command = script_command("experiments/sweep.py")
    assert "s3cret" not in command
    assert "postgresql://me:***@host:5432/db" in command
    for plain in ("sqlite:///runs/sweep.db", "http://host:30000/a@b", "12:30@noon"):
        assert without_password(plain) == plain
