"""The prompts stage: from settings to train.jsonl, one file a task, a manifest with all counts, and a
quarantine.

The order of the steps matters: tasks first, so that training prompts can be decontaminated against all of
them; duplicates out before the split, so that validation never holds a training prompt in other words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.config import PromptSettings, TaskSettings
from eagle3.data.chat import template_source
from eagle3.data.completion import Generate, PlannedPrompt
from eagle3.data.decontaminate import Contamination, duplicates, normalise
from eagle3.data.filters import LENIENT, refusal, special_tokens
from eagle3.data.journal import Journal
from eagle3.data.prompt import Prompt
from eagle3.data.readers import Read, read_file, read_hub, read_wheel
from eagle3.data.self_prompts import finish_prompts, plan_follow_ups, plan_prompts
from eagle3.data.splits import hash_order, position
from eagle3.data.tasks import TASKS, TaskPrompt, load_question_file, load_task
from eagle3.provenance import hash_object, write_json, write_jsonl

TRAIN, QUARANTINE, MANIFEST = "train.jsonl", "quarantine.jsonl", "manifest.json"
_EXCERPT = 200


@dataclass
class _Collected:
    """What the steps pass on: prompts still in, rows put aside, and counts for the manifest."""

    prompts: list[Prompt] = field(default_factory=list)
    quarantine: list[dict[str, object]] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)

    def put_aside(self, step: str, prompt: Prompt, reason: str) -> None:
        text = prompt.text[:_EXCERPT]
        self.quarantine.append(
            {"step": step, "source": prompt.source, "id": prompt.id, "reason": reason, "text": text}
        )


def prepare_prompts(
    tokenizer: PreTrainedTokenizerBase,
    settings: PromptSettings,
    tasks: TaskSettings,
    seed: int,
    generate: Generate,
    target_hash: str,
    prompts_folder: Path,
    tasks_folder: Path,
    journal_path: Path,
) -> dict[str, Any]:
    """Write all files of the stage; returns the manifest.

    Args:
        generate: samples the self-made prompts; called only for those that the journal does not hold yet.
        target_hash: the target that `generate` samples from; completions of another one are not reused.
        journal_path: where completions are kept as they come, so that a killed run goes on.

    Raises ValueError when a source is unusable, or no training prompt is left.
    """
    evaluation = load_tasks(tasks)
    collected = _Collected()
    collected.manifest = {"seed": seed, "chat_template": template_source(tokenizer)}
    if settings.self_generated.count:
        _self_generated(collected, tokenizer, settings, seed, generate, target_hash, journal_path)
    _read(collected, settings, special_tokens(tokenizer))
    _decontaminate(collected, evaluation)
    _deduplicate(collected)
    rows = _split(collected, settings)
    collected.manifest["tasks"] = _write_tasks(evaluation, tasks, tasks_folder)
    write_jsonl(prompts_folder / TRAIN, rows)
    write_jsonl(prompts_folder / QUARANTINE, collected.quarantine)
    write_json(prompts_folder / MANIFEST, collected.manifest)
    return collected.manifest


def load_tasks(settings: TaskSettings) -> dict[str, list[TaskPrompt]]:
    """All evaluation tasks by name; files may not take a built-in task's name (ValueError)."""
    clash = sorted(set(settings.files) & (set(settings.names) | set(TASKS)))
    if clash:
        raise ValueError(
            f"tasks.files: {clash[0]!r} is the name of a built-in task; give the file another name"
        )
    loaded = {name: load_task(name) for name in settings.names}
    return loaded | {name: load_question_file(name, Path(path)) for name, path in settings.files.items()}


def _self_generated(
    collected: _Collected,
    tokenizer: PreTrainedTokenizerBase,
    settings: PromptSettings,
    seed: int,
    generate: Generate,
    target_hash: str,
    journal_path: Path,
) -> None:
    """First turns, then second turns for a part of them; a second turn makes its prompt a two-turn prompt."""
    own = settings.self_generated
    sampling = own.model_dump(exclude={"count", "batch_size"})
    journal = Journal(journal_path, hash_object({"target": target_hash, "sampling": sampling, "seed": seed}))
    if journal.discarded:
        print(f"{journal_path}: of another target, sampling or seed; starting over", flush=True)
    try:
        plan = plan_prompts(tokenizer, own.count, seed)
        _sample(plan, generate, journal)
        first, refused = finish_prompts(tokenizer, plan, journal.completions)
        follow_plan = plan_follow_ups(tokenizer, first, seed)
        _sample(follow_plan, generate, journal)
        second, follow_refused = finish_prompts(tokenizer, follow_plan, journal.completions)
    finally:
        journal.close()
    # Kept beside its own first turn, a two-turn prompt would be a duplicate of it.
    longer = {prompt.turns[0]: prompt for prompt in second}
    collected.prompts += [longer.get(prompt.turns[0], prompt) for prompt in first]
    collected.manifest["self_generated"] = {
        "planned": len(plan),
        "kept": len(first),
        "refused": _sorted(refused),
        "follow_ups_planned": len(follow_plan),
        "follow_ups_kept": len(second),
        "follow_ups_refused": _sorted(follow_refused),
    }


def _sample(plan: Sequence[PlannedPrompt], generate: Generate, journal: Journal) -> None:
    missing = [planned for planned in plan if planned.id not in journal.completions]
    if len(missing) < len(plan):
        print(f"resuming: {len(plan) - len(missing)} of {len(plan)} prompts are there already", flush=True)
    if missing:
        for completion in generate(missing):
            journal.append(completion)


def _read(collected: _Collected, settings: PromptSettings, forbidden: frozenset[str]) -> None:
    reads: dict[str, Read] = {spec: read_file(spec) for spec in settings.files}
    reads |= {spec: read_wheel(spec) for spec in settings.wheels}
    reads |= {
        f"{data.name}[{data.split}]": read_hub(data.name, data.split, data.column, data.limit)
        for data in settings.datasets
    }
    counts: dict[str, dict[str, object]] = {}
    for spec, read in reads.items():
        refused: Counter[str] = Counter()
        for prompt in read.prompts:
            reason = next((r for turn in prompt.turns if (r := refusal(turn, LENIENT, forbidden))), None)
            if reason:
                refused[reason] += 1
                collected.put_aside("filter", prompt, reason)
            else:
                collected.prompts.append(prompt)
        for bad in read.quarantined:
            collected.quarantine.append(
                {"step": "read", "source": bad.source, "line": bad.line, "reason": bad.reason}
            )
        counts[spec] = {
            "prompts": len(read.prompts),
            "quarantined": len(read.quarantined),
            "refused": _sorted(refused),
        }
    collected.manifest["read"] = counts


def _decontaminate(collected: _Collected, evaluation: Mapping[str, Sequence[TaskPrompt]]) -> None:
    texts = {
        name: [text for prompt in task for text in (*prompt.turns, *prompt.bare)]
        for name, task in evaluation.items()
    }
    contamination = Contamination(texts)
    removed: Counter[str] = Counter()
    clean = []
    for prompt in collected.prompts:
        match = contamination.find(prompt.turns)
        if match is None:
            clean.append(prompt)
        else:
            removed[f"{match.task}:{match.how}"] += 1
            collected.put_aside("decontaminate", prompt, f"{match.task}:{match.how}")
    collected.prompts = clean
    collected.manifest["decontamination"] = {
        "word_ngram": contamination.ngram,
        "evaluation_prompts": sum(len(task) for task in evaluation.values()),
        "removed": _sorted(removed),
    }


def _deduplicate(collected: _Collected) -> None:
    repeats = duplicates([prompt.text for prompt in collected.prompts])
    for index, (twin, how) in repeats.items():
        collected.put_aside(
            "duplicate", collected.prompts[index], f"{how} duplicate of {collected.prompts[twin].id}"
        )
    collected.manifest["duplicates"] = _sorted(Counter(how for _, how in repeats.values()))
    collected.prompts = [p for index, p in enumerate(collected.prompts) if index not in repeats]


def _split(collected: _Collected, settings: PromptSettings) -> list[dict[str, object]]:
    """Rows in hash order, so that every shard and every prefix is a mix of all sources."""
    prompts = hash_order(collected.prompts, lambda prompt: prompt.id)
    prompts = prompts[: settings.limit] if settings.limit else prompts
    if len(prompts) < 2:
        raise ValueError(
            f"prompts: {len(prompts)} training prompts are left, 2 are needed: raise "
            "prompts.self_generated.count or name prompts.files, wheels or datasets"
        )
    # By the first turn, so that conversations that begin alike are on one side.
    places = [position("train", normalise(prompt.turns[0])) for prompt in prompts]
    # A set too small for its share still has one validation prompt, and never only such.
    threshold = min(max(settings.validation_share, min(places) * (1 + 1e-9)), max(places))
    rows = [
        prompt.row("validation" if place < threshold else "train")
        for prompt, place in zip(prompts, places, strict=True)
    ]
    collected.manifest["splits"] = _sorted(Counter(str(row["split"]) for row in rows))
    collected.manifest["sources"] = _sorted(Counter(prompt.source for prompt in prompts))
    collected.manifest["turns"] = _sorted(Counter(str(len(prompt.turns)) for prompt in prompts))
    return rows


def _write_tasks(
    evaluation: Mapping[str, Sequence[TaskPrompt]], settings: TaskSettings, folder: Path
) -> dict[str, dict[str, object]]:
    """One file a task; files of tasks that are no longer wanted are removed. Returns the counts."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.jsonl"):
        if stale.stem not in evaluation:
            stale.unlink()
    counts: dict[str, dict[str, object]] = {}
    for name, task in evaluation.items():
        rows = [prompt.row(settings.tuning_share) for prompt in task]
        write_jsonl(folder / f"{name}.jsonl", rows)
        source = TASKS[name].wheel if name in TASKS else settings.files[name]
        counts[name] = {"source": source, **_sorted(Counter(str(row["split"]) for row in rows))}
    return counts


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
