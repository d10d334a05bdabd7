"""Decoders without a model: tokens follow from the prefix, times are made up, faults are planted at will."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from eagle3.decoding.generation import Generation, Round
from eagle3.decoding.sampling import Sampling
from eagle3.measure.rendering import Prompt

VOCABULARY = 50
EOS = 0


def next_token(prefix: Sequence[int], salt: int = 0) -> int:
    """The fake target's greedy token: any deterministic function of the whole prefix does."""
    state = salt
    for token in prefix:
        state = (state * 31 + token + 7) % 10007
    return state % VOCABULARY


def continuation(prompt_ids: Sequence[int], count: int, salt: int = 0) -> tuple[int, ...]:
    """What the fake target answers."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + count:
        ids.append(next_token(ids, salt))
        if ids[-1] == EOS:
            break
    return tuple(ids[len(prompt_ids) :])


@dataclass
class FakeDecoder:
    """Answers like the fake target; `round_tokens` a round, `token_seconds` a token.

    `spoil` changes an answer's tokens; `fail` raises for a prompt; `calls` counts generations.
    """

    name: str
    token_seconds: float = 1.0
    round_tokens: int = 1
    prefill_seconds: float = 0.5
    spoil: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda tokens: tokens
    fail: Callable[[Sequence[int]], bool] = lambda _: False
    stop_after: int | None = None
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append(tuple(prompt_ids))
        if self.fail(prompt_ids):
            raise ValueError("planted failure")
        salt = sampling.seed if sampling.temperature else 0
        tokens = self.spoil(continuation(prompt_ids, max_new_tokens, salt))
        # Seconds differ by prompt, by a factor that all methods share, and a little from call to call.
        wobble = 1.0 + 0.1 * (sum(prompt_ids) % 7) + 0.01 * (len(self.calls) % 3)
        edges = [*range(1, len(tokens), self.round_tokens), len(tokens)]
        produced = [after - before for before, after in pairwise(edges)]
        seconds = self.token_seconds * wobble
        return Generation(
            token_ids=tokens,
            finish_reason="stop" if tokens[-1] == EOS else "length",
            prefill_seconds=self.prefill_seconds,
            decode_seconds=(len(tokens) - 1) * seconds,
            rounds=tuple(
                Round(
                    nodes=self.round_tokens,
                    depth=self.round_tokens - 1,
                    accepted=count - 1,
                    produced=count,
                    draft_seconds=0.2 * count * seconds,
                    verify_seconds=0.5 * count * seconds,
                    accept_seconds=0.1 * count * seconds,
                    cache_seconds=0.1 * count * seconds,
                )
                for count in produced
            )
            if self.round_tokens > 1
            else (),
        )


def fake_renderer(prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
    """One token a character, and the answers' own tokens between the turns."""
    ids = [1 + ord(letter) % (VOCABULARY - 1) for letter in prompt.turns[0]]
    for turn, answer in enumerate(answers, start=1):
        ids += [*answer, *(1 + ord(letter) % (VOCABULARY - 1) for letter in prompt.turns[turn])]
    return ids


def fake_rescore(token_ids: Sequence[int], start: int) -> Tensor:
    """Logit 10 for the fake target's token, 9.9 for the token after it, 0 elsewhere. [T - start, V]"""
    logits = torch.zeros(len(token_ids) - start, VOCABULARY)
    for row in range(len(token_ids) - start):
        best = next_token(token_ids[: start + row + 1])
        logits[row, (best + 1) % VOCABULARY] = 9.9
        logits[row, best] = 10.0
    return logits


def prompts(count: int = 12, task: str = "task", turns: int = 1) -> list[Prompt]:
    """Prompts of different lengths."""
    return [
        Prompt(
            task,
            f"{task}-{index}",
            tuple(f"turn {turn} of prompt {index}" + "x" * index for turn in range(turns)),
        )
        for index in range(count)
    ]
