"""Tasks protect the comparison: every prompt of a task is there, once, with a split that never changes."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.data.tasks import TASKS, load_question_file, load_task

ROWS: dict[str, list[dict[str, Any]]] = {
    "mt_bench": [{"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}],
    "humaneval": [
        {"task_id": "HumanEval/7", "prompt": '\n\ndef f(n):\n    """Double."""\n', "entry_point": "f"}
    ],
    "gsm8k": [{"id": "gsm8k-test-0013", "prompt": "How many?", "expected": "18"}],
    "summaries": [{"id": "3", "document": "Short text."}, {"id": "4", "document": "Long. " * 1000}],
    "questions": [{"question": "who wrote it"}, {"question": "when was it"}],
    "instructions": [{"key": "0", "prompt": "Do this. "}],
}
EXPECTED = {
    "mt_bench": {"mt_bench-81": ("Write.", "Rewrite.")},
    "humaneval": {"humaneval-7": ('Complete the code I provided.\n\ndef f(n):\n    """Double."""\n',)},
    "gsm8k": {"gsm8k-test-0013": ("How many?",)},
    "summaries": {"summaries-3": ("Summarize: Short text.",)},
    "questions": {"questions-0": ("who wrote it",), "questions-1": ("when was it",)},
    "instructions": {"instructions-0": ("Do this.",)},
}


@pytest.mark.parametrize("name", list(TASKS))
def test_built_in_tasks_read_their_wheels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(spec: str, file: str) -> Path:
        assert (spec, file) == (TASKS[name].wheel, TASKS[name].file)
        path = tmp_path / Path(file).name
        text = "".join(json.dumps(row) + "\n" for row in ROWS[name])
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    monkeypatch.setattr("eagle3.sources.fetch_wheel_file", fetch)
    prompts = load_task(name)
    assert {p.id: p.turns for p in prompts} == EXPECTED[name]
    row = prompts[0].row(tuning_share=0.5)
    assert row["task"] == name
    assert row["split"] in ("tuning", "held_out")
    assert prompts[0].row(0.0)["split"] == "held_out"


def test_bare_text_of_a_worded_task_is_known_for_decontamination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(ROWS["summaries"][0]))
    monkeypatch.setattr("eagle3.sources.fetch_wheel_file", lambda *_: path)
    assert load_task("summaries")[0].bare == ("Short text.",)


def test_question_files_of_eagle_and_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [{"question_id": i, "category": "math", "turns": [f"Q{i}"], "reference": ["A"]} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_question_file("math", path)
    assert sorted(p.id for p in prompts) == sorted(f"math-{i}" for i in range(30))
    assert [p.id for p in prompts] != [f"math-{i}" for i in range(30)]  # hash order: any prefix is a sample


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question_id": 1}', "question 1 needs question_id and turns"),
        ('{"question_id": 1, "turns": [""]}', "question 1 needs"),
        ('{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["b"]}', "id 'x-1' twice"),
        ("{broken", ":1: not JSON"),
        ("[1]", ":1: expected an object"),
        ("", "holds no prompts"),
    ],
)
def test_damaged_question_file_stops_instead_of_shrinking(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_question_file("x", path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question_id": 2, "turns": ["caf\xe9"]}', ":2: not UTF-8: .*; correct the line or remove it"),
        (b'{"question_id": 2, "turns": ["\\ud83d"]}', ":2: a text holds a lone surrogate"),
    ],
)
def test_damaged_text_is_named_by_its_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_bytes(b'{"question_id": 1, "turns": ["a"]}\n' + line)
    with pytest.raises(ValueError, match=message):
        load_question_file("x", path)


def test_question_file_of_the_home_folder_with_a_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "question.jsonl").write_bytes(b'\xef\xbb\xbf{"question_id": 1, "turns": ["a"]}')
    assert [p.id for p in load_question_file("x", Path("~/question.jsonl"))] == ["x-1"]


def test_unknown_task_and_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'arena' is not a built-in task: choose from mt_bench, .*tasks\.files"
    ):
        load_task("arena")
    with pytest.raises(ValueError, match="no such file of questions"):
        load_question_file("x", tmp_path / "none.jsonl")
