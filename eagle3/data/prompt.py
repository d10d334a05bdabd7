"""A training prompt as all sources deliver it, and its row in train.jsonl."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """User turns to be answered by the target one after the other.

    `id` is stable over runs: it seeds the answer and keys the regenerated row. `source` says where the
    turns come from (a file, a data set, "self:<kind>"). `system` None keeps the chat template's own system
    message.
    """

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None

    @property
    def text(self) -> str:
        """All turns as one text, for comparing prompts."""
        return "\n".join(self.turns)

    def row(self, split: str) -> dict[str, object]:
        """The row of train.jsonl: {"id", "source", "split", "turns", "system"}."""
        return {
            "id": self.id,
            "source": self.source,
            "split": split,
            "turns": list(self.turns),
            "system": self.system,
        }
