"""Regenerated rows on disk: what is written is read, in order; what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3.data.rows import HiddenStates, Row, read_rows, shard_name, write_hidden_states, write_rows


def row(number: int) -> Row:
    """Six tokens: a prompt of two, an answer, one token between, an answer."""
    return Row(
        id=f"id-{number}/ünïcode",
        source="test",
        split="train" if number % 3 else "validation",
        token_ids=(1, 2, 3, 4, 5, 10 + number),
        answer_spans=((2, 3), (4, 6)),
        finish_reason="stop",
        answers=("a\nb", "naïve “ü”"),
        target_argmax=(2, 3, 4, 5, 6),
    )


def finish(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def test_rows_come_back_as_they_were_in_the_order_of_the_shards(tmp_path: Path) -> None:
    shards = {10: [row(4)], 2: [row(1), row(2)], 0: [row(0)], 3: []}
    for index, rows in shards.items():
        write_rows(tmp_path, index, rows)
    finish(tmp_path)
    assert read_rows(tmp_path) == [row(0), row(1), row(2), row(4)]


def test_rows_are_one_json_object_a_line(tmp_path: Path) -> None:
    write_rows(tmp_path, 7, [row(0), row(1)])
    (path,) = tmp_path.iterdir()
    assert path.name == "shard-00007.jsonl" == f"{shard_name(7)}.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert [json.loads(line)["id"] for line in lines] == [row(0).id, row(1).id]
    assert json.loads(lines[0])["answer_spans"] == [[2, 3], [4, 6]]


def test_answer_mask_and_tokens_are_those_of_the_spans() -> None:
    assert row(0).answer_mask().tolist() == [False, False, True, False, True, True]
    assert row(0).answer_tokens == 3


def test_an_unfinished_regeneration_is_refused(tmp_path: Path) -> None:
    """Its rows are a part of the data: training on them would look like training on all."""
    write_rows(tmp_path, 0, [row(0)])
    with pytest.raises(
        ValueError, match=r"no finished regeneration there; run python experiments/regenerate\.py"
    ):
        read_rows(tmp_path)


def test_a_regeneration_without_rows_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, 0, [])
    finish(tmp_path)
    with pytest.raises(ValueError, match=r"holds no rows; see .*manifest\.json"):
        read_rows(tmp_path)


def test_hidden_states_come_back_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = {row(number).id: torch.randn(5, 8).to(torch.bfloat16) for number in range(5)}
    ids = list(states)
    write_hidden_states(tmp_path / "hidden", 0, ids[:2], [states[row_id] for row_id in ids[:2]])
    write_hidden_states(
        tmp_path / "hidden", 1, ids[2:], [states[row_id].T.contiguous().T for row_id in ids[2:]]
    )
    write_hidden_states(tmp_path / "hidden", 2, [], [])  # a shard whose rows were all dropped
    stored = HiddenStates(tmp_path / "hidden")
    for row_id, expected in states.items():
        assert row_id in stored
        assert stored[row_id].dtype == torch.bfloat16
        assert torch.equal(stored[row_id], expected)
    assert "another" not in stored
    with pytest.raises(KeyError):
        stored["another"]


def test_ids_and_states_of_different_number_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        write_hidden_states(tmp_path, 0, ["a", "b"], [torch.ones(1, 1)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [True, False])
def test_missing_hidden_states_are_refused_with_both_remedies(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "hidden"
    if exists:
        folder.mkdir()
    with pytest.raises(
        ValueError, match=r"regenerate\.capture_hidden_states to true .* train\.hidden_states to online"
    ):
        HiddenStates(folder)
