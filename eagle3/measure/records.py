"""Raw records of an evaluation: one cell a measured generation, kept in a journal that survives a kill."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from eagle3.decoding.generation import Generation
from eagle3.measure.acceptance import Rounds


@dataclass(frozen=True)
class CellKey:
    """What makes a cell: measured once, and never again by a run that resumes."""

    method: str
    task: str
    prompt_id: str
    turn: int
    temperature: float
    repeat: int


@dataclass(frozen=True)
class Cell:
    """One timed generation. Times in seconds; `token_ids` are the new tokens, the prefill token first.

    `process` numbers the run that measured it: 1, and one more after each resumption. `foreign_cpu` is the
    share of the machine's CPU time that other processes used meanwhile (0 to 1).
    """

    key: CellKey
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    acceptance_lengths: tuple[int, ...]
    accepted_drafts: tuple[int, ...]
    drafted_depths: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    cache_seconds: float
    process: int
    foreign_cpu: float

    @property
    def rounds(self) -> Rounds:
        return Rounds(self.acceptance_lengths, self.accepted_drafts, self.drafted_depths, self.prompt_tokens)

    @property
    def decode_tokens(self) -> int:
        """New tokens without the prefill's."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class Failure:
    """A generation that raised; its prompt is left out for every method, so that the pairs stay whole."""

    key: CellKey
    error: str


def cell_from_generation(
    key: CellKey, prompt_tokens: int, generation: Generation, process: int, foreign_cpu: float
) -> Cell:
    """The record of a generation."""
    return Cell(
        key=key,
        prompt_tokens=prompt_tokens,
        token_ids=tuple(generation.token_ids),
        finish_reason=generation.finish_reason,
        acceptance_lengths=tuple(generation.acceptance_lengths),
        accepted_drafts=tuple(generation.accepted_drafts),
        drafted_depths=tuple(generation.drafted_depths),
        prefill_seconds=generation.prefill_seconds,
        decode_seconds=generation.decode_seconds,
        draft_seconds=generation.draft_seconds,
        verify_seconds=generation.verify_seconds,
        accept_seconds=generation.accept_seconds,
        cache_seconds=generation.cache_seconds,
        process=process,
        foreign_cpu=foreign_cpu,
    )


@dataclass
class Journal:
    """An append-only JSONL file of cells and failures, headed by the identity they belong to.

    Opening a file with the same identity resumes it: what is there counts as measured. A file with another
    identity is renamed to `<name>.previous` and a new one is begun; `note` says which of the two happened and
    why. A last line that a kill cut short is dropped.
    """

    path: Path
    identity: Mapping[str, Any]
    cells: dict[CellKey, Cell] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    process: int = 1
    note: str = ""

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> "Journal":
        """Open for appending. Raises ValueError when a line other than the last one cannot be read."""
        wanted: dict[str, Any] = json.loads(json.dumps(identity))
        journal = cls(path, wanted)
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = _read_entries(path)
        if not entries:
            journal.note = "nothing was measured before"
            journal._begin()
        elif changed := changed_keys(entries[0]["identity"], wanted):
            previous = path.with_name(path.name + ".previous")
            path.replace(previous)
            journal.note = (
                f"measuring anew, because these changed: {', '.join(changed)}; "
                f"earlier records are in {previous}"
            )
            journal._begin()
        else:
            journal._resume(entries[1:])
        journal._append({"kind": "process", "process": journal.process})
        return journal

    def add(self, record: Cell | Failure) -> None:
        """Record and write through to the disk, so that a kill loses nothing that was measured."""
        if isinstance(record, Cell):
            assert record.key not in self.cells, f"{record.key} was measured already"
            self.cells[record.key] = record
            self._append({"kind": "cell", **asdict(record)})
        else:
            self.failures.append(record)
            self._append({"kind": "failure", **asdict(record)})

    @property
    def excluded(self) -> dict[tuple[str, str], str]:
        """(task, prompt id) -> error of the prompts left out."""
        return {(failure.key.task, failure.key.prompt_id): failure.error for failure in self.failures}

    def _begin(self) -> None:
        self.path.write_text(
            json.dumps({"kind": "header", "identity": self.identity}) + "\n", encoding="utf-8"
        )

    def _resume(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for entry in entries:
            if entry["kind"] == "cell":
                cell = _cell(entry)
                self.cells[cell.key] = cell
            elif entry["kind"] == "failure":
                self.failures.append(Failure(CellKey(**entry["key"]), entry["error"]))
            else:
                self.process = entry["process"] + 1
        self.note = (
            f"resuming: {len(self.cells)} generations were measured before, {len(self.failures)} failed"
        )

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys under which two nested mappings differ."""
    changed = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after or (key in old) != (key in new):
            changed.append(prefix + key)
    return changed


def _read_entries(path: Path) -> list[dict[str, Any]]:
    """The journal's lines, header first; truncates the file behind the last whole line."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    entries = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}:{number} is not JSON ({error}); delete the file to measure anew"
            ) from error
    if entries and entries[0].get("kind") != "header":
        raise ValueError(f"{path} does not begin with a header; delete the file to measure anew")
    return entries


def _cell(entry: Mapping[str, Any]) -> Cell:
    values = {item.name: entry[item.name] for item in fields(Cell)}
    values["key"] = CellKey(**values["key"])
    for name in ("token_ids", "acceptance_lengths", "accepted_drafts", "drafted_depths"):
        values[name] = tuple(values[name])
    return Cell(**values)
