"""Mean acceptance length, conditional acceptance by depth, histograms and acceptance by context length."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Upper bounds of the context buckets, in tokens of prompt plus answer before the round.
CONTEXT_BOUNDS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Rounds:
    """The verification rounds of one generation.

    `produced[r]` counts the tokens round r added to the output (accepted drafts plus the bonus token, clipped
    at the end of the sequence or the token limit); `accepted[r]` its accepted drafts before clipping;
    `depth[r]` how many drafts deep it had drafted. The prefill token belongs to no round.
    """

    produced: tuple[int, ...]
    accepted: tuple[int, ...]
    depth: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class DepthAcceptance:
    """Acceptance at `depth` (0 = the first draft) among the rounds that accepted all earlier drafts."""

    depth: int
    reached: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.reached


@dataclass(frozen=True)
class ContextAcceptance:
    """Mean acceptance length of the rounds whose context had from `low` to `high` - 1 tokens (None: open)."""

    low: int
    high: int | None
    rounds: int
    tau: float


def mean_acceptance_length(generations: Iterable[Rounds]) -> float | None:
    """τ: new tokens produced by verification rounds / verification rounds; None without a round.

    Counts the bonus token and not the prefill token; weighted by rounds over the whole set, not averaged per
    prompt. Worked: rounds producing 3, 1 and 2 tokens give τ = 6 / 3 = 2, and the output has 7 tokens, one of
    them from the prefill.
    """
    tokens = rounds = 0
    for generation in generations:
        tokens += sum(generation.produced)
        rounds += len(generation.produced)
    return tokens / rounds if rounds else None


def conditional_acceptance(generations: Iterable[Rounds]) -> list[DepthAcceptance]:
    """n-α: acceptance at depth n given that all earlier drafts of the round were accepted (arXiv 2401.15077).

    A round that drafted d deep and accepted a drafts reaches depths 0..min(a, d - 1) and is accepted at
    0..a-1. Worked: d = 3, a = 1 is an acceptance at depth 0, a rejection at depth 1, and says nothing about
    depth 2. In a tree, a depth counts as accepted when any of its nodes continues the accepted path, so the
    figures of a tree are above those of a chain; the paper's n-α is the chain's.
    """
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for generation in generations:
        for accepted_drafts, depth in zip(generation.accepted, generation.depth, strict=True):
            reached.update(range(min(accepted_drafts + 1, depth)))
            accepted.update(range(accepted_drafts))
    return [DepthAcceptance(depth, reached[depth], accepted[depth]) for depth in sorted(reached)]


def acceptance_histogram(generations: Iterable[Rounds]) -> list[int]:
    """Number of rounds by tokens produced: entry n counts the rounds that produced n tokens."""
    counts: Counter[int] = Counter()
    for generation in generations:
        counts.update(generation.produced)
    return [counts[length] for length in range(max(counts) + 1)] if counts else []


def acceptance_by_context(
    generations: Iterable[Rounds], bounds: Sequence[int] = CONTEXT_BOUNDS
) -> list[ContextAcceptance]:
    """τ by the number of tokens in context when the round began; buckets without a round are left out.

    Worked: a prompt of 100 tokens has 101 in context at its first round (the prefill token included); if that
    round produces 3, the second round begins at 104.
    """
    edges = [0, *bounds]
    tokens = [0] * len(edges)
    rounds = [0] * len(edges)
    for generation in generations:
        context = generation.prompt_tokens + 1
        for produced in generation.produced:
            bucket = sum(context >= bound for bound in bounds)
            tokens[bucket] += produced
            rounds[bucket] += 1
            context += produced
    return [
        ContextAcceptance(low, edges[i + 1] if i + 1 < len(edges) else None, rounds[i], tokens[i] / rounds[i])
        for i, low in enumerate(edges)
        if rounds[i]
    ]
