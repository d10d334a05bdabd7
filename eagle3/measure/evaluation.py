"""One evaluation from decoders and prompts to evaluation.json and per_prompt.parquet."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

import eagle3
from eagle3.decoding.generation import Decoder
from eagle3.measure.load import LoadSnapshot
from eagle3.measure.losslessness import Comparison, Rescore, compare_outputs, worst
from eagle3.measure.medians import Answer, AnswerKey, answers_from_cells
from eagle3.measure.protocol import VANILLA, arms, measure, prompt_ids_of, schedule, warm_up
from eagle3.measure.records import Cell, CellKey, Journal
from eagle3.measure.rendering import Prompt, Renderer
from eagle3.measure.settings import EvaluationSettings
from eagle3.measure.summary import pairs_table, prompt_table, results_table
from eagle3.measure.verdict import Circumstances, judge
from eagle3.provenance import hash_object, sha256_file, write_json, write_parquet

# The packages whose code decides what is generated and how fast.
_MEASURED_PACKAGES = ("decoding", "kernels", "measure", "models")


def evaluate(
    decoders: Sequence[Decoder],
    prompts: Sequence[Prompt],
    renderer: Renderer,
    rescore: Rescore,
    settings: EvaluationSettings,
    *,
    machine: Mapping[str, Any],
    subject: Mapping[str, Any],
    reports: Path,
    journal: Path,
    origin: Mapping[str, Any] | None = None,
    trees: Mapping[str, Mapping[str, int] | None] | None = None,
    pairs: Sequence[tuple[str, str]] = (),
    again: Decoder | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure all methods on all prompts and write `evaluation.json` and `per_prompt.parquet` into `reports`.

    Args:
        decoders: the methods; exactly one named "vanilla". It is measured a second time as "vanilla-aa".
        prompts: what to answer, all tasks together; a turn after the first continues the answers before it.
        renderer: token ids of a prompt's turn.
        rescore: the target's logits, for the near-tie check.
        settings: what is measured how often.
        machine: the fingerprint of the machine (`provenance.fingerprint_machine`).
        subject: what is evaluated: target, drafts with their hashes, threads. JSON-like.
        reports: the folder to write into.
        journal: where raw records are kept while measuring. A run that was killed resumes from it if machine,
            subject, settings, methods, prompts and code are the same, and measures anew otherwise; both are
            said. When everything is measured and written it is renamed to `<journal>.finished`.
        origin: recorded with the settings and not compared on resuming: commit, command.
        trees: the draft tree of each method that has one.
        pairs: (method, other method) to be compared with each other beside vanilla.
        again: decodes "vanilla-aa"; None for vanilla's own decoder.
        progress: show a progress bar.

    Returns:
        What `evaluation.json` holds: {"machine", "settings", "verdict", "results", "pairs"}.

    Raises:
        ValueError: for names of methods or prompts that cannot be told apart, or if no prompt is left.
    """
    methods = arms(decoders, again)
    _check_prompts(prompts)
    trees = trees or {}
    began, load_at_start = datetime.now(UTC), LoadSnapshot.take()
    log = Journal.open(
        journal,
        {
            "machine": dict(machine),
            "settings": settings.as_dict(),
            "subject": dict(subject),
            "methods": {name: trees.get(name) for name in methods},
            "prompts": hash_object([vars(prompt) for prompt in prompts]),
            "code": code_digest(),
        },
    )
    say = tqdm.write if progress else _quiet
    say(f"evaluation: {log.note}")
    blocks = schedule(prompts, settings)
    total = len(methods) * settings.repeats * len(settings.temperatures) * sum(len(p.turns) for p in prompts)
    say(f"evaluation: warming {len(set(map(id, methods.values())))} decoders up, untimed")
    warmed = warm_up(methods, prompts, renderer, settings) if len(log.cells) < total else {}
    with tqdm(
        total=total,
        initial=len(log.cells),
        desc="measuring",
        unit="gen",
        disable=not progress,
        file=sys.stderr,
    ) as bar:
        for record in measure(
            methods, blocks, renderer, settings, log.cells, excluded=log.excluded, process=log.process
        ):
            log.add(record)
            bar.update()
            if isinstance(record, Cell):
                bar.set_postfix_str(f"{record.key.method} on {record.key.task}")
            else:
                say(f"evaluation: {record.key} failed and its prompt is left out: {record.error}")

    kept = [prompt for prompt in prompts if prompt.key not in log.excluded]
    if not kept:
        raise ValueError(f"all {len(prompts)} prompts failed; the first error: {log.failures[0].error}")
    cells = [cell for key, cell in log.cells.items() if (key.task, key.prompt_id) not in log.excluded]
    answers = _in_order(answers_from_cells(cells), list(methods), prompts)
    comparisons = dict(_compare(kept, answers, renderer, rescore, settings, log.cells))
    results = results_table(answers, comparisons, dtype=settings.dtype, trees=trees, seed=settings.seed)
    per_prompt = prompt_table(answers, comparisons)
    circumstances = Circumstances(
        repeats=settings.repeats,
        foreign_cpu_mean=sum(cell.foreign_cpu for cell in cells) / len(cells),
        foreign_cpu_max=max(cell.foreign_cpu for cell in cells),
        excluded={f"{task}/{name}": error for (task, name), error in log.excluded.items()},
        processes=log.process,
        loads={"start": load_at_start.as_dict(), "end": LoadSnapshot.take().as_dict()},
    )
    report = {
        "machine": dict(machine),
        "settings": {
            **settings.as_dict(),
            "subject": dict(subject),
            "origin": dict(origin or {}),
            "warm_up": {name: item.as_dict() for name, item in warmed.items()},
            "started": began.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "resumed": log.note,
        },
        "verdict": judge(results, circumstances),
        "results": results,
        "pairs": pairs_table(per_prompt, pairs, settings.seed),
    }
    write_parquet(reports / "per_prompt.parquet", per_prompt)
    write_json(reports / "evaluation.json", report)
    journal.replace(journal.with_name(journal.name + ".finished"))
    return report


def code_digest() -> str:
    """Hash of the sources that decide what is generated and how fast: a changed engine is measured anew."""
    root = Path(eagle3.__file__).parent
    sources = sorted(
        path
        for package in _MEASURED_PACKAGES
        for path in (root / package).rglob("*")
        if path.suffix in (".py", ".cpp")
    )
    return hash_object({path.relative_to(root).as_posix(): sha256_file(path) for path in sources})


def _in_order(answers: list[Answer], methods: Sequence[str], prompts: Sequence[Prompt]) -> list[Answer]:
    """By method, temperature, prompt and turn as given: cells come in the random order of measuring."""
    place = {prompt.key: index for index, prompt in enumerate(prompts)}
    return sorted(
        answers,
        key=lambda answer: (
            methods.index(answer.key.method),
            answer.key.temperature,
            place[answer.key.task, answer.key.prompt_id],
            answer.key.turn,
        ),
    )


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise ValueError("there is no prompt to evaluate: name at least one task with at least one prompt")
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if prompt.key in seen:
            raise ValueError(f"prompt {prompt.id!r} of task {prompt.task!r} occurs twice: ids must differ")
        if not prompt.turns:
            raise ValueError(f"prompt {prompt.id!r} of task {prompt.task!r} has no turn")
        seen.add(prompt.key)


def _compare(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    renderer: Renderer,
    rescore: Rescore,
    settings: EvaluationSettings,
    cells: Mapping[CellKey, Cell],
) -> Iterator[tuple[AnswerKey, Comparison]]:
    """Every greedy answer, all of its repeats, against vanilla's first; vanilla's own repeats too."""
    by_key = {answer.key: answer for answer in answers}
    prompt_by_key = {prompt.key: prompt for prompt in prompts}
    for key, answer in by_key.items():
        if key.temperature != 0.0:
            continue
        vanilla = by_key[AnswerKey(VANILLA, key.task, key.prompt_id, key.turn, 0.0)]
        cell = CellKey(key.method, key.task, key.prompt_id, key.turn, 0.0, 0)
        prompt_ids = prompt_ids_of(cell, prompt_by_key[key.task, key.prompt_id], renderer, cells)
        yield (
            key,
            worst(
                compare_outputs(prompt_ids, vanilla.token_ids, output, settings.tolerance, rescore)
                for output in answer.outputs
            ),
        )


def _quiet(_: str) -> None:
    """Say nothing."""
