"""Completions kept as they come, so that a killed run goes on with the missing ones."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3.data.completion import Completion
from eagle3.provenance import write_text


class Journal:
    """An append-only JSONL file of completions, keyed by prompt id and never by line number or count.

    Its first line holds a key: what the completions depend on (target, sampling, seed). With another key
    the file is started anew. A line that a kill cut off is dropped.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self.completions: dict[str, Completion] = {}
        self.discarded = False
        """Whether completions of another key were found and thrown away."""
        lines = _whole_lines(path)
        if lines and json.loads(lines[0]) == {"key": key}:
            for line in lines[1:]:
                row = json.loads(line)
                self.completions[row["id"]] = Completion(row["id"], row["text"], row["finish_reason"])
        else:
            self.discarded = bool(lines)
            lines = [json.dumps({"key": key})]
        # Rewritten without the torn line; appending to it would join two records.
        write_text(path, "\n".join(lines) + "\n")
        self._stream = path.open("a", encoding="utf-8")

    def append(self, completion: Completion) -> None:
        """Store one completion; it survives a kill of the process from here on."""
        row = {"id": completion.id, "text": completion.text, "finish_reason": completion.finish_reason}
        self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._stream.flush()
        self.completions[completion.id] = completion

    def close(self) -> None:
        self._stream.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    text = path.read_bytes().decode("utf-8", errors="replace")
    return text.split("\n")[:-1]
