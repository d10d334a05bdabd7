"""reports/serving.json: each engine's part, which grows experiment by experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.provenance import write_json
from eagle3.serving.agreement import STATE_TOLERANCE

# What all rows of a part have in common; where one of these differs, earlier rows are of another measurement.
_SHARED = ("version", "dtype", "timed", "tasks", "prompts", "max_new_tokens", "machine")
_SHARED_ORIGIN = ("options", "urls", "environment", "target")


def read_part(path: Path, engine: str) -> dict[str, Any]:
    """The engine's part of the file; empty where there is none."""
    return _parts(path).get(engine, {})


def write_part(path: Path, engine: str, part: Mapping[str, Any]) -> None:
    """Write the engine's part; those of other engines stay."""
    write_json(path, {**_parts(path), engine: part})


def _parts(path: Path) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return parts


def with_earlier(part: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """A part with the rows that an earlier one has beside its own, where both were measured alike.

    Args:
        part: its origin has the hash of every draft that is there; a row of a draft that has changed since
            is left out.

    Returns:
        The part, with the agreement over all its rows.
    """
    kept: list[dict[str, Any]] = []
    states = part["hidden_state_difference"]
    if earlier and _alike(part, earlier):
        drafts, before = part["origin"]["drafts"], earlier["origin"]["drafts"]
        own = {row["name"] for row in part["experiments"]}
        kept = [
            row
            for row in earlier["experiments"]
            if row["name"] not in own
            and ("levels" not in row or row["draft"] is None or _same_draft(row["draft"], drafts, before))
        ]
        if states is None and all(_same_draft(name, drafts, before) for name in before):
            states = earlier["hidden_state_difference"]
    rows = [*kept, *part["experiments"]]
    measured = [row for row in rows if "levels" in row]
    exact = part["dtype"] == "float32"  # else differences are rounding's, and say nothing
    return {
        **part,
        **{
            key: all(row["agreement"][key] for row in measured) if exact and measured else None
            for key in ("tokens_equal", "acceptance_equal")
        },
        "hidden_states_equal": None if states is None else states <= STATE_TOLERANCE,
        "hidden_state_difference": states,
        "experiments": rows,
    }


def _same_draft(name: str, drafts: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether a draft has the hash that it had."""
    return name in before and drafts.get(name) == before[name]


def _alike(part: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    return all(part.get(key) == earlier.get(key) for key in _SHARED) and all(
        part["origin"].get(key) == earlier["origin"].get(key) for key in _SHARED_ORIGIN
    )
