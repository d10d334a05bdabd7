"""Rows that an earlier regeneration with the same settings has already made, for when prompts were added."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from eagle3.data.generate import Request
from eagle3.data.rows import HiddenStates, Row, read_shards

_FOLDERS = "earlier-*"


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


def set_aside(*folders: Path) -> None:
    """Move the shards of each folder into a subfolder, from where `EarlierRows` finds them."""
    for folder in folders:
        number = len(list(folder.glob(_FOLDERS)))
        aside = folder / f"earlier-{number:03d}"
        shards = sorted(folder.glob("shard-*"))
        if shards:
            aside.mkdir()
        for shard in shards:
            shard.replace(aside / shard.name)


def forget(*folders: Path) -> None:
    """Remove what was set aside, once every row is in a new shard."""
    for folder in folders:
        for aside in folder.glob(_FOLDERS):
            shutil.rmtree(aside)


class EarlierRows:
    """The rows that were set aside, by id, as far as they answer what is asked now."""

    def __init__(self, rows_folder: Path, hidden_folder: Path | None) -> None:
        """With a hidden_folder, rows without hidden states there do not count."""
        self._rows = {row.id: row for aside in rows_folder.glob(_FOLDERS) for row in read_shards(aside)}
        self._states: list[HiddenStates] = []
        if hidden_folder is not None:
            asides = [aside for aside in hidden_folder.glob(_FOLDERS) if any(aside.glob("shard-*"))]
            self._states = [HiddenStates(aside) for aside in asides]
            self._rows = {key: row for key, row in self._rows.items() if self.hidden(key) is not None}

    def matching(self, requests: Iterable[Request]) -> dict[str, Row]:
        """Of these requests, those that are answered already, by id."""
        rows = ((request, self._rows.get(request.id)) for request in requests)
        return {request.id: row for request, row in rows if row is not None and answers_request(row, request)}

    def hidden(self, row_id: str) -> Tensor | None:
        """A row's hidden states, read from disk; None without."""
        return next((states[row_id] for states in self._states if row_id in states), None)
