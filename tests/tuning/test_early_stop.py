"""A loser is stopped soon; a trial as good as the best is stopped no more often than the level says."""

import numpy as np

from eagle3.tuning.early_stop import compare, deciding_looks, is_losing


def named(values: list[float]) -> dict[str, float]:
    return {f"task/{index}": value for index, value in enumerate(values)}


def stops_after(trial: list[float], best: list[float], level: float) -> int | None:
    """Prompts after which a trial is stopped when it is looked at after every one."""
    for count in range(1, len(trial) + 1):
        if is_losing(compare(named(trial[:count]), named(best)), len(trial), level):
            return count
    return None


def test_clear_loser_is_stopped_before_the_end() -> None:
    best = [1.5 + 0.01 * index for index in range(12)]
    # Seven looks, after 6 to 12 prompts, share the level: 2**-6 > 0.1 / 7 > 2**-7. Six: 2**-7 < 0.1 / 6.
    assert stops_after([value * 0.7 for value in best], best, 0.1) == 6


def test_looks_that_can_stop_share_the_level() -> None:
    for looks in range(1, 30):
        for level in (0.01, 0.05, 0.1, 0.3):
            count = deciding_looks(looks, level)
            if count > 1:  # the first of them can stop a trial
                assert 2.0 ** -(looks - count + 1) < level / count
            if count < looks:  # one more could not
                assert 2.0 ** -(looks - count) >= level / (count + 1)


def test_winner_and_equal_are_never_stopped() -> None:
    best = [1.5] * 12
    assert stops_after([1.6] * 12, best, 0.5) is None
    assert stops_after(best, best, 0.5) is None


def test_level_0_never_stops() -> None:
    assert stops_after([1.0] * 40, [2.0] * 40, 0.0) is None


def test_equal_trials_are_stopped_at_most_at_the_level() -> None:
    noise = np.random.default_rng(3)
    trials, level = 150, 0.2
    stopped = 0
    for _ in range(trials):
        trial, best = np.exp(noise.normal(0.4, 0.05, (2, 12))).tolist()
        stopped += stops_after(trial, best, level) is not None
    # Three standard deviations of a binomial above the level are 0.3.
    assert stopped / trials <= 0.3


def test_only_common_prompts_are_compared() -> None:
    comparison = compare({"a": 1.0, "b": 1.0, "new": 0.1}, {"a": 2.0, "b": 2.0, "old": 1.0})
    assert (comparison.prompts, comparison.lost) == (2, 2)
