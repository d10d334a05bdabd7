"""What the report reads: the evaluation, training histories, manifests, and optional results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Inputs:
    """Everything the report shows. An optional result is None where its file does not exist."""

    evaluation: Mapping[str, Any]
    per_prompt: pd.DataFrame
    training: Mapping[str, list[dict[str, Any]]]  # draft -> rows of its metrics.jsonl
    target: Mapping[str, Any]  # the target's manifest, or empty
    drafts: Mapping[str, Mapping[str, Any]]  # draft -> its manifest
    ablation: Mapping[str, Any] | None = None
    scaling: Mapping[str, Any] | None = None
    sweep: Mapping[str, Any] | None = None
    serving: Mapping[str, Any] | None = None
    throughput: Mapping[str, Any] | None = None
    context: Mapping[str, Any] | None = None
    command: str = "make repro"
    results: list[Row] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.results))

    @property
    def changes_tokens(self) -> set[str]:
        """Methods with an output that is not the target's own, at whatever temperature it was seen."""
        return {row["method"] for row in self.results if row["lossless"]["failures"]}

    @property
    def tasks(self) -> list[str]:
        return [task for task in dict.fromkeys(row["task"] for row in self.results) if task != "all"]

    @property
    def temperatures(self) -> list[float]:
        return sorted({row["temperature"] for row in self.results})

    def overall(self, temperature: float) -> list[Row]:
        """The rows over all tasks at one temperature, in the methods' order."""
        return [row for row in self.results if row["task"] == "all" and row["temperature"] == temperature]

    def find(self, method: str, task: str, temperature: float) -> Row | None:
        """One result, or None where it was not measured."""
        for row in self.results:
            if (row["method"], row["task"], row["temperature"]) == (method, task, temperature):
                return row
        return None


def read_inputs(
    reports: Path,
    training: Mapping[str, Path],
    target: Mapping[str, Any],
    drafts: Mapping[str, Mapping[str, Any]],
    command: str,
) -> Inputs:
    """Read all files. Raises ValueError where the evaluation is missing or a history is not JSONL."""
    evaluation_file, table_file = reports / "evaluation.json", reports / "per_prompt.parquet"
    for path in (evaluation_file, table_file):
        if not path.is_file():
            raise ValueError(f"{path} does not exist: measure first (python experiments/evaluate.py)")
    evaluation = _read_json(evaluation_file)
    optional = {
        name: _read_json(reports / f"{name}.json") if (reports / f"{name}.json").is_file() else None
        for name in ("ablation", "scaling", "sweep", "serving", "throughput", "context")
    }
    return Inputs(
        evaluation=evaluation,
        per_prompt=pd.read_parquet(table_file),
        training={name: _read_history(path) for name, path in training.items() if path.is_file()},
        target=target,
        drafts=drafts,
        command=command,
        results=evaluation["results"],
        **optional,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): run the stage that writes it again") from error
    return values


def _read_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in order of step; a resumed training may have written a step twice."""
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.setdefault(int(row["step"]), {}).update(row)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number} is not a metrics row with a step: {error!r}") from error
    return [rows[step] for step in sorted(rows)]
