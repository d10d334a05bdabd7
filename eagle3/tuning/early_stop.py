"""Stopping a trial that loses: a test paired by prompt, corrected for looking after every prompt.

Optuna's WilcoxonPruner does the same test at the full level at every look, so that a trial as good as the
best is stopped more often than the level says. Here the looks share the level (Bonferroni).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

_EXACT_UP_TO = 50


@dataclass(frozen=True)
class Comparison:
    """A trial against the best so far on the prompts both have; `p` is the chance of losing so by luck."""

    prompts: int
    lost: int
    p: float


def compare(speedups: Mapping[str, float], best: Mapping[str, float]) -> Comparison:
    """One-sided Wilcoxon signed-rank test of log speedups, paired by prompt. p = 1 without a difference."""
    common = [key for key in speedups if key in best]
    differences = np.array([math.log(speedups[key] / best[key]) for key in common])
    lost = int((differences < 0).sum())
    if not differences.any() or differences.mean() >= 0:
        return Comparison(len(common), lost, 1.0)
    # Exact for few prompts, without the slow permutations that scipy would choose for ties.
    differences = differences[differences != 0]
    method = "exact" if len(differences) <= _EXACT_UP_TO else "asymptotic"
    p = float(stats.wilcoxon(differences, alternative="less", method=method).pvalue)
    return Comparison(len(common), lost, p)


def is_losing(comparison: Comparison, looks: int, level: float) -> bool:
    """Whether to stop: by luck in at most `level` of the trials that are as good as the best.

    The best so far is itself the luckiest of several, so that against it the chance is somewhat larger.

    Args:
        looks: how often the question is asked in a whole trial.
        level: 0 never stops.
    """
    return comparison.p < level / deciding_looks(looks, level)


def deciding_looks(looks: int, level: float) -> int:
    """How many looks, the last ones, can stop a trial at all: they alone share the level.

    After n prompts the smallest p is 2**-n. Worked, for 9 looks and level 0.1: shared by the last four, each
    has 0.025, which 2**-6 at the sixth prompt reaches; shared by five, each has 0.02, which 2**-5 does not.
    """
    count = 1
    while count < looks and 2.0 ** -(looks - count) < level / (count + 1):
        count += 1
    return count
