"""Rows that an earlier regeneration with the same settings has already made, for when prompts were added or
are grouped otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eagle3.data.generate import Request
from eagle3.data.rows import HiddenStates, Row, read_shards

_PREFIX = "earlier-"
_MOVING = "moving"  # what the subfolder of rows is called until everything is in it


@dataclass(frozen=True)
class EarlierRow:
    """A row of an earlier regeneration, and where its hidden states are, if it has any."""

    row: Row
    states: HiddenStates | None

    @property
    def hidden(self) -> Tensor | None:
        """The row's hidden states, read from disk."""
        return self.states[self.row.id] if self.states is not None else None


def answers_request(row: Row, request: Request) -> bool:
    """Whether a row is what asking `request` gives: its tokens outside the answers are the request's own.

    An answer depends on the target, the sampling and the row's id, besides these tokens. A row whose last
    turn was not asked counts only where its answer was cut off: in any other case there might be room now.
    """
    asked = len(row.answer_spans)
    if asked < len(request.segments) and row.finish_reason != "length":
        return False
    at = 0
    for segment, (start, end) in zip(request.segments, row.answer_spans, strict=False):
        if row.token_ids[at:start] != segment:
            return False
        at = end
    return at == len(row.token_ids) and asked <= len(request.segments)


def set_aside(rows_folder: Path, hidden_folder: Path) -> None:
    """Move the shards of both folders into a subfolder of one new name, where `EarlierRows` finds them.

    After a kill the same call ends what was begun: the rows' subfolder, by which the next one is numbered,
    gets its name when everything else is moved.
    """
    numbers = (int(path.name.removeprefix(_PREFIX)) for path in rows_folder.glob(f"{_PREFIX}*"))
    name = f"{_PREFIX}{1 + max(numbers, default=-1):03d}"
    moving = rows_folder / _MOVING
    moving.mkdir(exist_ok=True)
    for folder, aside in ((hidden_folder, hidden_folder / name), (rows_folder, moving)):
        for shard in sorted(folder.glob("shard-*")):
            aside.mkdir(exist_ok=True)
            shard.replace(aside / shard.name)
    moving.replace(rows_folder / name)


def half_set_aside(rows_folder: Path) -> bool:
    """Whether a kill interrupted `set_aside`."""
    return (rows_folder / _MOVING).exists()


def forget(rows_folder: Path, hidden_folder: Path) -> None:
    """Remove what was set aside, once every row is in a new shard."""
    for folder in (hidden_folder, rows_folder):  # no hidden states may wait for the next rows of their number
        for aside in folder.glob(f"{_PREFIX}*"):
            shutil.rmtree(aside)


class EarlierRows:
    """The rows that were set aside, each with the hidden states that were set aside with it."""

    def __init__(self, rows_folder: Path, hidden_folder: Path | None) -> None:
        """With a hidden_folder, rows without hidden states do not count."""
        self._found: dict[str, list[EarlierRow]] = {}
        for aside in sorted(rows_folder.glob(f"{_PREFIX}*"), reverse=True):  # the latest first
            states = None
            if hidden_folder is not None:
                if not any((hidden_folder / aside.name).glob("shard-*.safetensors")):
                    continue
                states = HiddenStates(hidden_folder / aside.name)
            for row in read_shards(aside):
                if states is None or row.id in states:
                    self._found.setdefault(row.id, []).append(EarlierRow(row, states))

    def matching(self, requests: Iterable[Request]) -> dict[str, EarlierRow]:
        """Of these requests, those that are answered already, by id."""
        found: dict[str, EarlierRow] = {}
        for request in requests:
            for earlier in self._found.get(request.id, ()):
                if answers_request(earlier.row, request):
                    found[request.id] = earlier
                    break
        return found
