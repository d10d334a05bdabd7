"""Does a method produce the target's own tokens? Equality, or a near tie shown by the target's logits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch
from torch import Tensor

from eagle3.models.target import Target

# Largest difference of two logits, in logit units, that counts as a tie. Logits of a language model's likely
# tokens are 10 to 50; neighbouring bfloat16 values differ by 2^-3 in [16, 32), float16's by 2^-6. A single
# token and a tree of them take different kernels, so each of the two logits may be a few steps off. Measured
# with SmolLM2-135M in bfloat16 and torch's kernels, 240 tokens one by one against all at once: the five best
# logits moved by up to 0.5 (0.1 on average), and the three tokens that changed were up to 0.125 apart.
# float32 runs must agree exactly: the differences are near 1e-5 and never decided a token in practice.
TIE_TOLERANCE = {"float32": 0.0, "bfloat16": 0.5, "float16": 0.0625}

Rescore = Callable[[Sequence[int], int], Tensor]
"""rescore(token_ids, start) -> logits [T - start, V]: row i scores the token after token_ids[start + i]."""


class Outcome(StrEnum):
    """How one output compares with vanilla's."""

    EXACT = "exact"
    NEAR_TIE = "near_tie"
    FAILURE = "failure"


@dataclass(frozen=True)
class Divergence:
    """Where an output first differs from vanilla's, and how far apart the target scores the two tokens.

    `index` counts new tokens from 0. `gap` is the largest distance of a produced token's logit from the
    target's best logit, from the first divergence on; None where one output merely ends early.
    """

    index: int
    vanilla_token: int | None
    method_token: int | None
    gap: float | None


@dataclass(frozen=True)
class Comparison:
    """The outcome for one output, with the divergence when there is one."""

    outcome: Outcome
    divergence: Divergence | None = None


@dataclass(frozen=True)
class LosslessCounts:
    """Outputs compared with vanilla's: `compared` = `exact` + `near_ties` + `failures`."""

    compared: int
    exact: int
    near_ties: int
    failures: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def tie_tolerance(dtype: str) -> float:
    """The tolerance for a dtype name such as "bfloat16". Raises ValueError for a dtype without one."""
    if dtype not in TIE_TOLERANCE:
        raise ValueError(
            f"dtype {dtype!r} has no near-tie tolerance: use one of {', '.join(TIE_TOLERANCE)}, "
            "or give the tolerance explicitly"
        )
    return TIE_TOLERANCE[dtype]


def first_divergence(vanilla: Sequence[int], method: Sequence[int]) -> int | None:
    """Index of the first differing token; the shorter length when one output is a prefix of the other."""
    for index, (expected, produced) in enumerate(zip(vanilla, method, strict=False)):
        if expected != produced:
            return index
    return None if len(vanilla) == len(method) else min(len(vanilla), len(method))


def compare_outputs(
    prompt_ids: Sequence[int],
    vanilla: Sequence[int],
    method: Sequence[int],
    tolerance: float,
    rescore: Rescore,
) -> Comparison:
    """Compare greedy outputs; a divergence is accepted only as a near tie of the target's logits.

    One forward over the prompt and the method's output scores every position. At the first divergence both
    tokens, and after it every token of the method, must lie within `tolerance` of the target's best logit on
    the method's own prefix: a method that diverges at a tie and then goes wrong is still a failure. With
    tolerance 0 nothing is rescored and any divergence is a failure. An output that ends where vanilla's goes
    on (or the reverse) is a failure too, since equal tokens must stop equally.

    Worked: prompt [7, 8], vanilla [1, 2, 3], method [1, 5, 6] diverge at index 1. Rescoring [7, 8, 1, 5, 6]
    from start 2: row 0 scores the token after `1`, where logits of 2 and 5 are compared with the best; row 1
    scores 6 after 5.
    """
    index = first_divergence(vanilla, method)
    if index is None:
        return Comparison(Outcome.EXACT)
    if index == min(len(vanilla), len(method)):
        tokens = [output[index] if index < len(output) else None for output in (vanilla, method)]
        return Comparison(Outcome.FAILURE, Divergence(index, tokens[0], tokens[1], None))
    if tolerance == 0.0:
        return Comparison(Outcome.FAILURE, Divergence(index, vanilla[index], method[index], None))
    start = len(prompt_ids) + index - 1
    logits = rescore([*prompt_ids, *method], start).float()  # [len(method) - index + 1, V]
    best = logits.max(dim=-1).values  # [len(method) - index + 1]
    produced = torch.tensor(list(method[index:]), device=logits.device)  # [len(method) - index]
    rows = torch.arange(len(produced), device=logits.device)
    gap = (best[: len(produced)] - logits[rows, produced]).max()
    gap = torch.maximum(gap, best[0] - logits[0, vanilla[index]])
    divergence = Divergence(index, vanilla[index], method[index], float(gap))
    # `<=` and not its negation: a NaN gap must fail.
    return Comparison(Outcome.NEAR_TIE if float(gap) <= tolerance else Outcome.FAILURE, divergence)


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """The worst of the comparisons of one output's repeats: it decides about the output."""
    order = (Outcome.EXACT, Outcome.NEAR_TIE, Outcome.FAILURE)
    return max(comparisons, key=lambda comparison: order.index(comparison.outcome))


def count_outcomes(outcomes: Iterable[Outcome]) -> LosslessCounts:
    """Counts over outputs."""
    found = list(outcomes)
    return LosslessCounts(
        compared=len(found),
        exact=found.count(Outcome.EXACT),
        near_ties=found.count(Outcome.NEAR_TIE),
        failures=found.count(Outcome.FAILURE),
    )


def target_rescorer(target: Target) -> Rescore:
    """Rescore with one causal forward of the target, in its own dtype, on a cache of its own."""

    def rescore(token_ids: Sequence[int], start: int) -> Tensor:
        length = len(token_ids)
        ids = torch.tensor([list(token_ids)], device=target.device)  # [1, T]
        positions = torch.arange(length, device=target.device)[None]  # [1, T]
        with torch.inference_mode():
            output = target.forward(ids, positions, target.new_cache(length), logits="none")
            # Only the rows asked for: all of a long prompt's logits would take gigabytes.
            return target.logits(output.final[0, start:])

    return rescore
