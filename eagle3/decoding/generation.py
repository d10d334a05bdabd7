"""What a decoder returns, and the stop rule all decoders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eagle3.decoding.sampling import Sampling


@dataclass(frozen=True)
class Round:
    """One cycle of the speculative engine: draft, verify, accept, compact. Times in seconds."""

    nodes: int  # verified by the target, root included
    depth: int  # of the deepest drafted token
    accepted: int  # drafted tokens accepted, before clipping at a stop
    produced: int  # tokens added to the output: accepted + bonus, after clipping
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    cache_seconds: float


def rounds_of_lengths(
    produced: Sequence[int],
    nodes: int,
    depth: int,
    draft_seconds: float = 0.0,
    verify_seconds: float = 0.0,
    accept_seconds: float = 0.0,
) -> tuple[Round, ...]:
    """Rounds of which no more is known than the tokens that each produced.

    Drafts accepted beyond a stop are not seen.

    Args:
        produced: tokens of each round.
        nodes, depth: of the largest tree that there can be.
        draft_seconds, verify_seconds, accept_seconds: of all rounds together, spread evenly.
    """
    count = max(1, len(produced))
    parts = draft_seconds / count, verify_seconds / count, accept_seconds / count
    return tuple(Round(nodes, depth, tokens - 1, tokens, *parts, cache_seconds=0.0) for tokens in produced)


@dataclass(frozen=True)
class Generation:
    """The tokens of one answer and how they came about. Times in seconds, from one clock.

    `prefill_seconds` ends with the first token chosen and the draft's pass over the prompt;
    `decode_seconds` is the rest. A vanilla generation has no rounds.
    """

    token_ids: tuple[int, ...]  # new tokens only, EOS included
    finish_reason: str  # "stop" | "length"
    prefill_seconds: float
    decode_seconds: float
    rounds: tuple[Round, ...] = ()

    @property
    def acceptance_lengths(self) -> tuple[int, ...]:
        """Tokens produced by each round, bonus included, clipped at EOS and the limit; without prefill's."""
        return tuple(r.produced for r in self.rounds)

    @property
    def accepted_drafts(self) -> tuple[int, ...]:
        """Drafted tokens accepted in each round, before clipping."""
        return tuple(r.accepted for r in self.rounds)

    @property
    def drafted_depths(self) -> tuple[int, ...]:
        """Depth of each round's tree: the most that could have been accepted."""
        return tuple(r.depth for r in self.rounds)

    @property
    def draft_seconds(self) -> float:
        """Time in the draft, its pass over the prompt not counted."""
        return sum(r.draft_seconds for r in self.rounds)

    @property
    def verify_seconds(self) -> float:
        """Time in the target's forwards of the rounds."""
        return sum(r.verify_seconds for r in self.rounds)

    @property
    def accept_seconds(self) -> float:
        """Time in choosing the accepted path and the bonus token."""
        return sum(r.accept_seconds for r in self.rounds)

    @property
    def cache_seconds(self) -> float:
        """Time in moving accepted cache slots together."""
        return sum(r.cache_seconds for r in self.rounds)


class Decoder(Protocol):
    """Anything that answers a prompt."""

    name: str

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """Decode up to `max_new_tokens` tokens after the prompt, to the first EOS if that comes earlier.

        Raises:
            ValueError: before anything runs, if the request is empty or does not fit.
        """


class Answer:
    """The new tokens so far; stops exactly at EOS (included) and at the limit."""

    def __init__(self, max_new_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._limit = max_new_tokens
        self._eos = eos_token_ids

    @property
    def finished(self) -> bool:
        """Whether an EOS or the limit has been reached."""
        return self.finish_reason is not None

    def extend(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the stop; returns how many were taken."""
        assert not self.finished
        for taken, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            if token in self._eos:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self._limit:
                self.finish_reason = "length"
            if self.finished:
                return taken
        return len(tokens)


def check_request(prompt_ids: Sequence[int], max_new_tokens: int, draft_tokens: int, context: int) -> int:
    """The cache slots a request needs, checked against the model's context length.

    Args:
        prompt_ids: the prompt.
        max_new_tokens: most tokens to decode.
        draft_tokens: nodes that one verification appends, root included (0 for vanilla).
        context: positions that the model supports.

    Raises:
        ValueError: for an empty prompt, fewer than one new token, or a request longer than the context.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: give at least one token (for example the BOS token)")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
    needed = len(prompt_ids) + max_new_tokens + draft_tokens
    if needed > context:
        raise ValueError(
            f"the request needs {needed} positions ({len(prompt_ids)} prompt + {max_new_tokens} new + "
            f"{draft_tokens} draft tokens), the context has {context}: shorten the prompt, or lower "
            "max_new_tokens or num_draft_tokens"
        )
    return needed
