"""Prompts of an evaluation and the token ids of each of their turns."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import conversation, next_turn_ids, render_prompt


@dataclass(frozen=True)
class Prompt:
    """One item of a task: its user turns, and the system message or None for the template's default."""

    task: str
    id: str
    turns: tuple[str, ...]
    system: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.id


class Renderer(Protocol):
    """Token ids of a prompt's turn, given the token ids of the answers before it."""

    def __call__(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]: ...


@dataclass(frozen=True)
class ChatRenderer:
    """Renders with the tokenizer's chat template, and continues the answers' own token ids.

    The answers are not decoded to text and tokenised again, so that a second turn sees exactly what was
    produced.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: Collection[int]

    def __call__(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
        """Ids up to where answer number `len(answers)` begins; an answer cut at the limit is closed first."""
        ids = render_prompt(self.tokenizer, conversation(prompt.turns[:1], system=prompt.system))
        for index, answer in enumerate(answers):
            ids += answer
            if not answer or answer[-1] not in self.eos_token_ids:
                ids.append(int(self.tokenizer.eos_token_id))
            turns = prompt.turns[: index + 2]
            ids += next_turn_ids(self.tokenizer, turns, prompt.system, self.eos_token_ids)
        return ids
