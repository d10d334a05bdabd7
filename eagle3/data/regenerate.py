"""Regeneration: the target answers the training prompts, in shards that survive a kill."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3 import paths
from eagle3.config import RegenerateSettings
from eagle3.data import chat
from eagle3.data.earlier import EarlierRow, EarlierRows, forget, half_set_aside, set_aside
from eagle3.data.endpoints import Refused, answer_from_endpoints
from eagle3.data.generate import Answered, Request, answer
from eagle3.data.prompt import Prompt
from eagle3.data.rows import MANIFEST, Row, shard_name, write_hidden_states, write_rows
from eagle3.decoding.sampling import Sampling
from eagle3.models.target import Target
from eagle3.provenance import hash_object, write_json, write_jsonl

RESUME_KEY = "resume.json"
_QUARANTINE = "quarantine-{:05d}.jsonl"  # the prompts of a shard that no server takes, with the reason
_TORN = ".[0-9]*.*"  # what a kill left of a file half written: see `eagle3.provenance.replacing`


@dataclass
class _Group:
    """The prompts of one shard and what has come back for them."""

    index: int
    prompts: Sequence[tuple[Prompt, str]]
    earlier: dict[str, EarlierRow] = field(default_factory=dict)
    answered: dict[str, Answered] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # reasons

    @property
    def complete(self) -> bool:
        return len(self.earlier) + len(self.answered) + len(self.refused) == len(self.prompts)


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
    shards, whatever the batch size. With other prompts, or another `group_size`, it keeps the rows of those
    that are the same, so that adding prompts costs little more than their own answers (those that were
    dropped are asked again); with other settings or another target it starts over. It says which.

    Args:
        prompts: each with its split, "train" or "validation".
        identity: what else the answers depend on (hashes of target and code); kept beside the shards.

    Returns:
        The manifest: counts and reasons.

    Raises:
        ValueError: if two prompts have one id.
    """
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, seed)
    # Who answers, how many at once, and how many rows a shard holds, is no part of what the rows are.
    decisive = settings.model_dump(exclude={"endpoints", "concurrency", "batch_size", "group_size"}) | {
        "served": bool(settings.endpoints)
    }
    requests, left_out = _requests(target, prompts, settings)
    usable = [(prompt, split) for prompt, split in prompts if prompt.id in requests]
    asked = [(prompt.id, prompt.source, split, requests[prompt.id].segments) for prompt, split in usable]
    marker: dict[str, Any] = {
        "key": hash_object({"settings": decisive, "seed": seed, **identity}),
        "prompts": hash_object(asked),
        "group_size": settings.group_size,  # which of them a shard holds
    }
    _prepare_folders(rows_folder, hidden_folder, marker)
    groups = [
        _Group(index, usable[start : start + settings.group_size])
        for index, start in enumerate(range(0, len(usable), settings.group_size))
    ]
    missing = [group for group in groups if not (rows_folder / f"{shard_name(group.index)}.jsonl").exists()]
    if len(missing) < len(groups):
        print(f"resuming: {len(groups) - len(missing)} of {len(groups)} shards are there already", flush=True)
    earlier = EarlierRows(rows_folder, hidden_folder if settings.capture_hidden_states else None)
    for group in missing:
        group.earlier = earlier.matching(requests[prompt.id] for prompt, _ in group.prompts)
    if kept := sum(len(group.earlier) for group in missing):
        print(
            f"other prompts or shards: {kept} of {len(usable)} are the same and keep their answers",
            flush=True,
        )
    for group in missing:
        if group.complete:
            _write_group(target, group, settings, rows_folder, hidden_folder)
    waiting = {
        prompt.id: group for group in missing for prompt, _ in group.prompts if prompt.id not in group.earlier
    }
    started, tokens = time.monotonic(), 0
    asking = _answers(target, (requests[row_id] for row_id in waiting), settings, sampling)
    with (
        tqdm(total=len(usable), initial=len(usable) - len(waiting), unit="prompt", desc="regenerate") as bar,
        closing(asking),  # whatever fails here: requests under way end with it
    ):
        for answered in asking:
            group = waiting[answered.id]
            bar.update()
            if isinstance(answered, Refused):
                group.refused[answered.id] = answered.reason
            else:
                group.answered[answered.id] = answered
                tokens += sum(end - start for start, end in answered.answer_spans)
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s")
            if group.complete:
                _write_group(target, group, settings, rows_folder, hidden_folder)
                group.answered.clear()
    forget(rows_folder, hidden_folder)
    manifest = _summary(rows_folder, left_out)
    write_json(rows_folder / MANIFEST, manifest | {"identity": identity | {"prompts": marker["prompts"]}})
    return manifest


def _answers(
    target: Target, requests: Iterator[Request], settings: RegenerateSettings, sampling: Sampling
) -> Generator[Answered | Refused]:
    """Answers of this machine, or of servers."""
    if not settings.endpoints:
        yield from answer(
            target,
            requests,
            sampling,
            settings.batch_size,
            settings.max_new_tokens,
            settings.max_length,
            settings.capture_hidden_states,
        )
        return
    yield from answer_from_endpoints(
        settings.endpoints,
        requests,
        sampling,
        settings.concurrency,
        settings.max_new_tokens,
        settings.max_length,
        target.eos_token_ids,
        paths.TARGET,
        say=tqdm.write,
    )


def _prepare_folders(rows_folder: Path, hidden_folder: Path, marker: dict[str, Any]) -> None:
    """Keep the shards of the same regeneration, set those of other prompts or groups aside, remove all
    others.
    """
    path, folders = rows_folder / RESUME_KEY, (rows_folder, hidden_folder)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    for folder in folders:
        for torn in folder.glob(_TORN):
            torn.unlink()
    if found == marker and not half_set_aside(rows_folder):
        return
    if found is None or found["key"] != marker["key"]:
        if found is not None:
            print(f"{rows_folder}: made with other settings or another target; starting over", flush=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    else:
        (rows_folder / MANIFEST).unlink(missing_ok=True)
        for refused in rows_folder.glob("quarantine-*.jsonl"):  # those prompts are asked again
            refused.unlink()
        set_aside(*folders)
    write_json(path, marker)


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
    target: Target,
    group: _Group,
    settings: RegenerateSettings,
    rows_folder: Path,
    hidden_folder: Path,
) -> None:
    if group.refused:  # before the shard, which marks the group as done
        write_jsonl(
            rows_folder / _QUARANTINE.format(group.index),
            [
                {"id": prompt.id, "source": prompt.source, "reason": group.refused[prompt.id]}
                for prompt, _ in group.prompts
                if prompt.id in group.refused
            ],
        )
    kept = list(_rows(target, group, settings))
    if settings.capture_hidden_states:
        states = [
            group.earlier[row.id].hidden if row.id in group.earlier else group.answered[row.id].hidden
            for row in kept
        ]
        write_hidden_states(
            hidden_folder, group.index, [row.id for row in kept], [s for s in states if s is not None]
        )
    write_rows(rows_folder, group.index, kept)


def _rows(target: Target, group: _Group, settings: RegenerateSettings) -> Iterator[Row]:
    for prompt, split in group.prompts:
        if prompt.id in group.earlier:
            yield replace(group.earlier[prompt.id].row, source=prompt.source, split=split)
            continue
        if prompt.id in group.refused:
            continue
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
            digests.append((row["id"], row["split"], row["token_ids"]))
    for path in folder.glob("quarantine-*.jsonl"):
        with path.open(encoding="utf-8") as stream:
            left_out["refused by the endpoints"] += sum(1 for _ in stream)
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
