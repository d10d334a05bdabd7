"""A self-made prompt as it is planned, and what the target writes to complete it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedPrompt:
    """One user turn to be sampled: the target continues `prefix_ids`, which end with `stem`."""

    id: str
    kind: str
    ending: str
    prefix_ids: tuple[int, ...]
    stem: str
    system: str | None
    """System message of the resulting training row; None is the template's own."""
    turns_before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What the target sampled after a prefix: text with special tokens kept, but without the EOS that ended
    it.
    """

    id: str
    text: str
    finish_reason: str  # "stop" or "length"


Generate = Callable[[Sequence[PlannedPrompt]], Iterable[Completion]]
"""Samples every planned prompt, seeded by its id; yields completions in any order."""
