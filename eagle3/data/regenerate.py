"""Regeneration: the target answers the training prompts, in shards that survive a kill."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3.config import RegenerateSettings
from eagle3.data import chat
from eagle3.data.endpoints import answer_from_endpoints
from eagle3.data.generate import Answered, Request, answer
from eagle3.data.prompt import Prompt
from eagle3.data.rows import MANIFEST, Row, shard_name, write_hidden_states, write_rows
from eagle3.decoding.sampling import Sampling
from eagle3.models.target import Target
from eagle3.provenance import hash_object, write_json

RESUME_KEY = "resume.json"


@dataclass
class _Group:
    """The prompts of one shard and what has come back for them."""

    index: int
    prompts: Sequence[tuple[Prompt, str]]
    answered: dict[str, Answered] = field(default_factory=dict)


def regenerate(
    target: Target,
    prompts: Sequence[tuple[Prompt, str]],
    settings: RegenerateSettings,
    seed: int,
    rows_folder: Path,
    hidden_folder: Path,
    identity: dict[str, Any],
) -> dict[str, Any]:
    """Answer every prompt and write the rows, in the prompts' order, `group_size` a shard.

    A shard is written when all its rows are there. After a kill the same call goes on with the missing
    shards; with other settings, prompts or target it starts over and says so.

    Args:
        prompts: each with its split, "train" or "validation".
        identity: what else the answers depend on (target hash, prompts hash); kept beside the shards.

    Returns:
        The manifest: counts and reasons.

    Raises:
        ValueError: if two prompts have one id.
    """
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, seed)
    # Which servers answer, and how many requests they get at once, is no part of what the rows are.
    decisive = settings.model_dump(exclude={"endpoints", "concurrency"}) | {
        "served": bool(settings.endpoints)
    }
    key = hash_object({"settings": decisive, "seed": seed, **identity})
    _prepare_folders(rows_folder, hidden_folder, key)
    requests, left_out = _requests(target, prompts, settings)
    usable = [(prompt, split) for prompt, split in prompts if prompt.id in requests]
    groups = [
        _Group(index, usable[start : start + settings.group_size])
        for index, start in enumerate(range(0, len(usable), settings.group_size))
    ]
    missing = [group for group in groups if not (rows_folder / f"{shard_name(group.index)}.jsonl").exists()]
    if len(missing) < len(groups):
        print(f"resuming: {len(groups) - len(missing)} of {len(groups)} shards are there already", flush=True)
    waiting = {prompt.id: group for group in missing for prompt, _ in group.prompts}
    started, tokens = time.monotonic(), 0
    with tqdm(total=len(usable), initial=len(usable) - len(waiting), unit="prompt", desc="regenerate") as bar:
        for answered in _answers(target, (requests[row_id] for row_id in waiting), settings, sampling):
            tokens += sum(end - start for start, end in answered.answer_spans)
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s")
            group = waiting[answered.id]
            group.answered[answered.id] = answered
            if len(group.answered) == len(group.prompts):
                _write_group(target, group, settings, rows_folder, hidden_folder)
                group.answered.clear()
    manifest = _summary(rows_folder, left_out)
    write_json(rows_folder / MANIFEST, manifest | {"identity": identity})
    return manifest


def _answers(
    target: Target, requests: Iterator[Request], settings: RegenerateSettings, sampling: Sampling
) -> Iterator[Answered]:
    """Answers of this machine, or of servers."""
    if not settings.endpoints:
        return answer(
            target,
            requests,
            sampling,
            settings.batch_size,
            settings.max_new_tokens,
            settings.max_length,
            settings.capture_hidden_states,
        )
    return answer_from_endpoints(
        settings.endpoints,
        requests,
        sampling,
        settings.concurrency,
        settings.max_new_tokens,
        settings.max_length,
        target.eos_token_ids,
        say=tqdm.write,
    )


def _prepare_folders(rows_folder: Path, hidden_folder: Path, key: str) -> None:
    """Keep the shards of the same regeneration, remove those of another."""
    marker = rows_folder / RESUME_KEY
    if marker.exists() and json.loads(marker.read_text())["key"] != key:
        print(f"{rows_folder}: made with other settings, prompts or target; starting over", flush=True)
        marker.unlink()
    for folder in (rows_folder, hidden_folder):  # what a kill left of a shard half written
        for path in folder.glob(".*.shard-*"):
            path.unlink()
    if not marker.exists():
        for folder in (rows_folder, hidden_folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        write_json(marker, {"key": key})


def _requests(
    target: Target, prompts: Sequence[tuple[Prompt, str]], settings: RegenerateSettings
) -> tuple[dict[str, Request], Counter[str]]:
    """The token ids of every prompt; those that leave no room for an answer are left out and counted."""
    requests: dict[str, Request] = {}
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
    for prompt, _ in prompts:
        if prompt.id in seen:
            raise ValueError(f"prompt id {prompt.id!r} occurs twice; an answer is kept under its prompt's id")
        seen.add(prompt.id)
        try:
            segments = _segments(target, prompt)
        except ValueError as error:  # a chat template that cannot render these turns: one row, not the run
            left_out[f"not rendered: {str(error)[:60]}"] += 1
            continue
        if len(segments[0]) + min(settings.max_new_tokens, 16) > settings.max_length:
            left_out["prompt too long"] += 1
        else:
            requests[prompt.id] = Request(prompt.id, segments)
    return requests, left_out


def _segments(target: Target, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    tokenizer, turns = target.tokenizer, prompt.turns
    first = chat.render_prompt(tokenizer, chat.conversation(turns[:1], system=prompt.system))
    following = [
        chat.next_turn_ids(tokenizer, turns[:count], prompt.system, target.eos_token_ids)
        for count in range(2, len(turns) + 1)
    ]
    return tuple(tuple(ids) for ids in (first, *following))


def _write_group(
    target: Target, group: _Group, settings: RegenerateSettings, rows_folder: Path, hidden_folder: Path
) -> None:
    kept = list(_rows(target, group, settings))
    if settings.capture_hidden_states:
        states = [group.answered[row.id].hidden for row in kept]
        write_hidden_states(
            hidden_folder, group.index, [row.id for row in kept], [s for s in states if s is not None]
        )
    write_rows(rows_folder, group.index, kept)


def _rows(target: Target, group: _Group, settings: RegenerateSettings) -> Iterator[Row]:
    for prompt, split in group.prompts:
        answered = group.answered[prompt.id]
        if answered.finish_reason == "length" and settings.incomplete == "drop":
            continue
        texts = [
            target.tokenizer.decode(answered.token_ids[start:end], skip_special_tokens=True)
            for start, end in answered.answer_spans
        ]
        yield Row(
            prompt.id,
            prompt.source,
            split,
            answered.token_ids,
            answered.answer_spans,
            answered.finish_reason,
            tuple(texts),
            answered.target_argmax,
        )


def _summary(folder: Path, left_out: Counter[str]) -> dict[str, Any]:
    """Counts over the finished shards, whoever wrote them."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    digests = []
    for path in sorted(folder.glob("shard-*.jsonl")):
        for line in path.open(encoding="utf-8"):
            row = json.loads(line)
            counts[row["split"]] += 1
            counts["tokens"] += len(row["token_ids"])
            counts["answer_tokens"] += sum(end - start for start, end in row["answer_spans"])
            reasons[row["finish_reason"]] += 1
            digests.append((row["id"], row["token_ids"]))
    return {
        "rows": counts["train"] + counts["validation"],
        "train": counts["train"],
        "validation": counts["validation"],
        "tokens": counts["tokens"],
        "answer_tokens": counts["answer_tokens"],
        "finish_reason": dict(sorted(reasons.items())),
        "left_out": dict(sorted(left_out.items())),
        "data_hash": hash_object(digests),
    }
