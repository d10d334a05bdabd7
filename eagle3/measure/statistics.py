"""Medians over repeats and paired bootstrap intervals of a ratio of totals."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 5000
# scipy draws resamples in batches of this many: 5000 x 500 prompts x 4 columns at once would need 80 MB.
BATCH = 1000


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap interval; `low` and `high` are None where no interval exists.

    `method` says how the interval was made: "BCa"; "percentile" where BCa is undefined (the estimate lies
    outside of every resample); "constant" where every resample gives the same value; "none" for one prompt,
    or where too few prompts have tokens.
    """

    estimate: float
    low: float | None
    high: float | None
    method: str
    samples: int


def is_slower(speedup: float, high: float | None) -> bool:
    """Below 1 beyond its interval, which ends at `high`, or, without one, below 1."""
    return (speedup if high is None else high) < 1.0


def misses_by_chance(intervals: int, confidence: float = CONFIDENCE) -> int:
    """How many of so many intervals may miss the true value: more do in at most 1 - confidence of all cases.

    Taken for independent. Intervals of the same prompts move together, so that more than this miss a little
    more often. Worked: one of one misses in 5 % of all cases, which is not more than 5 %: none may. Two or
    more of seven miss in 4.4 %: one may.
    """
    return int(stats.binom.ppf(confidence, intervals, 1.0 - confidence))


def median_over_repeats(values: Sequence[float]) -> float:
    """Median of one cell's repeats, in the unit of the values."""
    if not values:
        raise ValueError("a cell without a repeat has no median: every prompt needs at least one measurement")
    return float(np.median(np.asarray(values, dtype=np.float64)))


def relative_spread(values: Sequence[float]) -> float:
    """(max - min) / median of one cell's repeats: the noise of a single measurement, without unit."""
    middle = median_over_repeats(values)
    return (max(values) - min(values)) / middle if middle > 0 else 0.0


def speedup_interval(
    baseline_seconds: Sequence[float],
    method_seconds: Sequence[float],
    baseline_tokens: Sequence[int],
    method_tokens: Sequence[int],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Speedup of a method over the baseline with a paired BCa interval over prompts.

    The speedup is the baseline's total seconds per token over the method's. Where both produced the same
    tokens (T = 0) this is the ratio of total times; where sampling makes the lengths differ, it does not
    reward a method for a shorter answer. Entry i of all four sequences belongs to prompt i, and prompts are
    resampled as a whole, so that the pairing survives. BCa: Efron (1987), as in `scipy.stats.bootstrap`.

    Raises ValueError for sequences of different lengths, no prompt at all, or totals that are not positive.
    """
    columns = [
        np.asarray(column, dtype=np.float64)
        for column in (baseline_seconds, baseline_tokens, method_seconds, method_tokens)
    ]
    count = len(columns[0])
    if any(len(column) != count for column in columns):
        raise ValueError(
            f"paired columns have {[len(column) for column in columns]} entries: "
            "give one entry a prompt in each"
        )
    if count == 0:
        raise ValueError("no prompt was measured: a speedup needs at least one")
    for name, column in zip(
        ("baseline seconds", "baseline tokens", "method seconds", "method tokens"), columns, strict=True
    ):
        if not np.isfinite(column).all() or column.sum() <= 0 or (column < 0).any():
            raise ValueError(
                f"{name} must be finite, not negative and positive in total, got {column.tolist()}"
            )
    estimate = float(_seconds_per_token_ratio(columns[0], columns[1], columns[2], columns[3]))
    if count == 1:
        return Interval(estimate, None, None, "none", 1)
    return _bootstrap(columns, estimate, seed, confidence, resamples)


def _seconds_per_token_ratio(
    baseline_seconds: NDArray[np.float64],
    baseline_tokens: NDArray[np.float64],
    method_seconds: NDArray[np.float64],
    method_tokens: NDArray[np.float64],
    axis: int = -1,
) -> NDArray[np.float64]:
    """(baseline seconds / baseline tokens) / (method seconds / method tokens), of totals along `axis`."""
    baseline = baseline_seconds.sum(axis) * method_tokens.sum(axis)
    ratio: NDArray[np.float64] = baseline / (method_seconds.sum(axis) * baseline_tokens.sum(axis))
    return ratio


def _bootstrap(
    columns: list[NDArray[np.float64]], estimate: float, seed: int, confidence: float, resamples: int
) -> Interval:
    with warnings.catch_warnings():
        # Degenerate data is handled below, by what the result holds; the warning would repeat it unread.
        warnings.simplefilter("ignore", category=stats.DegenerateDataWarning)
        warnings.simplefilter("ignore", category=RuntimeWarning)
        result = stats.bootstrap(
            columns,
            _seconds_per_token_ratio,
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            batch=BATCH,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
    count = len(columns[0])
    distribution = np.asarray(result.bootstrap_distribution, dtype=np.float64)
    if not np.isfinite(distribution).all():
        # Some resamples hold no decoded token at all: too few prompts decoded any.
        return Interval(estimate, None, None, "none", count)
    # Equal up to rounding: sums in another order differ in the last bits.
    if np.ptp(distribution) <= 1e-12 * abs(estimate):
        return Interval(estimate, estimate, estimate, "constant", count)
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    if np.isfinite(low) and np.isfinite(high):
        return Interval(estimate, low, high, "BCa", count)
    tail = (1.0 - confidence) / 2.0
    low, high = (float(value) for value in np.quantile(distribution, [tail, 1.0 - tail]))
    return Interval(estimate, low, high, "percentile", count)
