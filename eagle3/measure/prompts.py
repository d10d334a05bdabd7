"""Which prompts are measured: so many of a split of each task."""

import json
from collections.abc import Sequence
from pathlib import Path

from eagle3.measure.rendering import Prompt


def task_prompts(
    folder: Path, tasks: Sequence[str], split: str, count: int, from_end: bool = False
) -> list[Prompt]:
    """The first or last prompts of a split of every task; any part of a task's file is a fair sample.

    Raises:
        ValueError: if a task was not prepared, or has no prompt in the split.
    """
    prompts = []
    for task in tasks:
        path = folder / f"{task}.jsonl"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: prepare the tasks first: dvc repro prompts")
        with path.open(encoding="utf-8") as stream:
            rows = [row for row in map(json.loads, stream) if row["split"] == split]
        if not rows:
            raise ValueError(f"{path} has no prompt of the {split} split: change tasks.tuning_share")
        if len(rows) < count:
            print(f"task {task}: only {len(rows)} prompts of the {split} split of {count} wanted")
        prompts += [
            Prompt(task, row["id"], tuple(row["turns"]))
            for row in (rows[-count:] if from_end else rows[:count])
        ]
    return prompts
