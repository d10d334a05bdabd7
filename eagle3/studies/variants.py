"""Variants of a draft: which there are, and their training, each once and resumable."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.config import (
    Eagle3Settings,
    EagleSettings,
    Settings,
    TrainedSettings,
    TrainSettings,
    changed_draft,
)
from eagle3.data.rows import Row
from eagle3.provenance import hash_object, write_json
from eagle3.training.run import TrainingData, train_draft

DONE = "done.json"


@dataclass(frozen=True)
class Variant:
    """One draft of a study.

    Args:
        name: of its folder.
        method: of its rows in the results.
        train_tokens: distinct tokens of training rows; 0 takes all rows.
    """

    name: str
    method: str
    draft: TrainedSettings
    train: TrainSettings
    train_tokens: int


def ablation_variants(settings: Settings) -> list[Variant]:
    """The draft as it is, and with one thing changed at a time."""
    study = settings.studies.ablation
    base = settings.drafts[study.draft]
    assert isinstance(base, Eagle3Settings)  # Settings has seen to it
    train = settings.train.model_copy(update={"token_budget": study.token_budget})
    drafts = {study.draft: base}
    for name, changes in study.variants.items():
        drafts[name] = changed_draft(base, changes)
    return [Variant(name, name, draft, train, study.train_tokens) for name, draft in drafts.items()]


def scaling_variants(settings: Settings) -> list[Variant]:
    """Each draft on each amount of data, with as many epochs on each."""
    study = settings.studies.scaling
    variants = []
    for tokens in study.train_tokens:
        budget = max(1, round(tokens * study.epochs))
        train = settings.train.model_copy(update={"token_budget": budget})
        for name in study.drafts:
            draft = settings.drafts[name]
            assert isinstance(draft, EagleSettings | Eagle3Settings)  # Settings has seen to it
            variants.append(Variant(f"{name}-{tokens}", name, draft, train, tokens))
    return variants


def train_variants(
    data: TrainingData,
    variants: Sequence[Variant],
    seed: int,
    code: str,
    folder: Path,
    log: Callable[[str, dict[str, float], int], None],
) -> dict[str, dict[str, Any]]:
    """Train every variant whose draft is not there yet, in `folder`/<name>; says what is gone on with.

    Args:
        code: hash of the code that trains.
        log: called with the variant's name, every measurement and its step.

    Returns:
        By name: distinct training tokens, and how the training ended.
    """
    results: dict[str, dict[str, Any]] = {}
    chosen = {variant.name: first_rows(data.rows, variant) for variant in variants}
    for variant in variants:
        rows = chosen[variant.name]
        tokens = sum(len(row.token_ids) for row in rows if row.split == "train")
        mine = replace(data, rows=rows)
        identity = {"code": code, "train_tokens": variant.train_tokens}
        key = hash_object(
            [
                variant.draft.model_dump(mode="json"),
                variant.train.model_dump(mode="json"),
                *(seed, data.identity, identity),
            ]
        )
        place = folder / variant.name
        done = place / DONE
        known = json.loads(done.read_text(encoding="utf-8")) if done.is_file() else {}
        if known.get("key") == key:
            print(f"{variant.name}: trained before", flush=True)
        else:
            done.unlink(missing_ok=True)
            print(f"{variant.name}: training on {tokens:,} distinct tokens", flush=True)
            work, name = place / "train", variant.name
            result = train_draft(
                mine,
                variant.draft,
                variant.train,
                seed,
                identity,
                work,
                place / "draft",
                lambda measured, step, name=name: log(name, measured, step),  # type: ignore[misc]
            )
            known = {
                "key": key,
                "train_tokens": tokens,
                "tokens_trained": result.tokens,
                "simulated_acceptance_length": result.acceptance_length,
            }
            write_json(done, known)
            shutil.rmtree(work)
        results[variant.name] = {name: value for name, value in known.items() if name != "key"}
    return results


def first_rows(rows: Sequence[Row], variant: Variant) -> list[Row]:
    """Training rows of about the variant's amount of tokens, and every validation row.

    A smaller amount is part of every larger one, and all sources are in it: rows are taken in the order of a
    hash of their ids.

    Raises:
        ValueError: if there are fewer tokens.
    """
    tokens = variant.train_tokens
    usable = [row for row in rows if len(row.token_ids) <= variant.train.max_length]
    chosen = [row for row in usable if row.split == "validation"]
    total = 0
    for row in sorted((row for row in usable if row.split == "train"), key=_rank):
        if tokens and total >= tokens:
            break
        chosen.append(row)
        total += len(row.token_ids)
    if total < tokens:
        raise ValueError(
            f"the study wants {tokens:,} training tokens, there are {total:,}: lower studies.*.train_tokens, "
            "or regenerate more"
        )
    return chosen


def _rank(row: Row) -> str:
    return hashlib.sha256(row.id.encode()).hexdigest()
