"""Rows and batches with the real hidden states of a tiny target, and settings to train on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle3.config import Eagle3Settings, EagleSettings, TrainSettings, parse_settings
from eagle3.data.hidden_states import OnlineStates, RowStates
from eagle3.data.rows import Row
from eagle3.models.target import Target
from eagle3.parameters import read_profile
from eagle3.training.batches import Batch, make_batch

_DEFAULT = parse_settings(read_profile("default", Path(__file__).parents[2] / "profiles"))


def eagle3_settings(**changes: Any) -> Eagle3Settings:
    """The default EAGLE-3 draft, changed."""
    settings = _DEFAULT.drafts["eagle3"]
    assert isinstance(settings, Eagle3Settings)
    return Eagle3Settings.model_validate({**settings.model_dump(), **changes})


def eagle_settings(**changes: Any) -> EagleSettings:
    """The default EAGLE draft, changed."""
    settings = _DEFAULT.drafts["eagle"]
    assert isinstance(settings, EagleSettings)
    return EagleSettings.model_validate({**settings.model_dump(), **changes})


def steps(count: int) -> tuple[dict[str, Any], ...]:
    """A training-time test of `count` steps throughout, as the setting has it."""
    return ({"from_share": 0.0, "steps": count},)


def train_settings(**changes: Any) -> TrainSettings:
    """Small and fast, changed."""
    small = {
        "token_budget": 1500,
        "batch_tokens": 96,
        "max_length": 64,
        "lr": 1e-3,
        "validate_every": 4,
        "validation_tokens": 200,
        "checkpoint_every": 3,
    }
    return TrainSettings.model_validate({**_DEFAULT.train.model_dump(), **small, **changes})


def sample_rows(target: Target, count: int = 24, seed: int = 0, validation: int = 6) -> list[Row]:
    """Random rows of 10 to 30 tokens: a prompt of 3 to 6, an answer, a next turn of 3, a second answer."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(10, 31, (), generator=generator))
        prompt = int(torch.randint(3, 7, (), generator=generator))
        ids = torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
        middle = prompt + (length - prompt) // 2
        rows.append(
            Row(
                id=f"row-{index}",
                source="test",
                split="validation" if index >= count - validation else "train",
                token_ids=tuple(ids),
                answer_spans=((prompt, middle), (middle + 3, length)),
                finish_reason="stop",
                answers=("", ""),
                target_argmax=(),
            )
        )
    online = OnlineStates(target)
    return [replace(row, target_argmax=tuple(online(row).target_argmax.tolist())) for row in rows]


def sample_batch(target: Target, count: int = 4, seed: int = 0, exact: bool = False) -> Batch:
    """A batch of such rows; `exact` keeps the states in float32 instead of rounding them to bfloat16."""
    rows = sample_rows(target, count, seed)
    online = OnlineStates(target)
    return make_batch(rows, (lambda row: exact_states(target, row)) if exact else online, target.hidden_size)


def exact_states(target: Target, row: Row) -> RowStates:
    """As OnlineStates, in float32."""
    length = len(row.token_ids) - 1
    ids = torch.tensor([row.token_ids[:length]])
    output = target.forward(ids, torch.arange(length)[None], target.new_cache(length), logits="none")
    hidden = torch.cat((output.captured[0], output.final[0]), dim=-1)
    return RowStates(hidden, torch.tensor(row.target_argmax))
