"""Regenerated rows on disk: shards of JSON lines beside shards of hidden states, in a fixed order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.provenance import replacing, write_jsonl

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Row:
    """One conversation answered by the target."""

    id: str
    source: str
    split: str  # "train" or "validation"
    token_ids: tuple[int, ...]
    answer_spans: tuple[tuple[int, int], ...]  # half-open, the EOS included
    finish_reason: str  # "stop" or "length"
    answers: tuple[str, ...]
    target_argmax: tuple[int, ...]  # the target's most likely next token, [T - 1]; empty if not kept

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target produced."""
        return sum(end - start for start, end in self.answer_spans)

    def answer_mask(self) -> Tensor:
        """True where the target produced the token, bool [T]."""
        mask = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for start, end in self.answer_spans:
            mask[start:end] = True
        return mask


def shard_name(index: int) -> str:
    """The stem of the files of a shard."""
    return f"shard-{index:05d}"


def write_rows(folder: Path, index: int, rows: Sequence[Row]) -> None:
    """Write the rows of one shard atomically. This file is what marks the shard as done."""
    write_jsonl(folder / f"{shard_name(index)}.jsonl", [asdict(row) for row in rows])


def read_rows(folder: Path) -> list[Row]:
    """All rows in order.

    Raises:
        ValueError: if there are none, or the regeneration that writes them has not finished.
    """
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: no finished regeneration there; run python experiments/regenerate.py")
    rows = list(read_shards(folder))
    if not rows:
        raise ValueError(f"{folder}: holds no rows; see {folder / MANIFEST} for what was left out and why")
    return rows


def read_shards(folder: Path) -> Iterator[Row]:
    """The rows of every shard that is there, in order, whether or not the regeneration has finished."""
    for path in sorted(folder.glob("shard-*.jsonl")):
        for line in path.open(encoding="utf-8"):
            values = json.loads(line)
            values["token_ids"] = tuple(values["token_ids"])
            values["answer_spans"] = tuple((start, end) for start, end in values["answer_spans"])
            values["answers"] = tuple(values["answers"])
            values["target_argmax"] = tuple(values["target_argmax"])
            yield Row(**values)


def write_hidden_states(folder: Path, index: int, ids: Sequence[str], states: Sequence[Tensor]) -> None:
    """Write the hidden states of one shard atomically, each row under its id.

    Args:
        folder: created if missing.
        index: of the shard.
        ids: of the rows.
        states: bfloat16 [T - 1, (n + 1) H] each: the captured layers, then the final state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{shard_name(index)}.safetensors") as temporary:
        save_file({row_id: state.contiguous() for row_id, state in zip(ids, states, strict=True)}, temporary)


class HiddenStates:
    """Hidden states by row id, read from the shards as they are asked for (memory-mapped)."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("shard-*.safetensors"))
        if not paths:
            raise ValueError(
                f"{folder}: no hidden states there; set regenerate.capture_hidden_states to true and "
                "regenerate, or train.hidden_states to online"
            )
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._where = {row_id: file for file in self._files for row_id in file.keys()}  # noqa: SIM118

    def __getitem__(self, row_id: str) -> Tensor:
        """[T - 1, (n + 1) H] bfloat16. KeyError for a row without states."""
        return self._where[row_id].get_tensor(row_id)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._where
