"""Splits by hash protect comparisons over time: a row never moves to the other side."""

from collections import Counter

import pytest

from eagle3.data.splits import choose_split, hash_order, position


def test_split_has_the_wanted_share_and_ignores_other_rows() -> None:
    ids = [f"q{i}" for i in range(2000)]
    splits = {i: choose_split("gsm8k", i, 0.3, "tuning", "held_out") for i in ids}
    assert Counter(splits.values())["tuning"] == pytest.approx(600, abs=70)
    assert {
        i: choose_split("gsm8k", i, 0.3, "tuning", "held_out") for i in reversed(ids[:50])
    }.items() <= splits.items()


def test_larger_share_keeps_the_smaller_one_inside() -> None:
    ids = [f"q{i}" for i in range(300)]
    small = {i for i in ids if choose_split("t", i, 0.2, "a", "b") == "a"}
    assert small < {i for i in ids if choose_split("t", i, 0.5, "a", "b") == "a"}


def test_position_is_pinned() -> None:
    # Changing the hash would move rows of published splits.
    assert position("mt_bench", "mt_bench-81") == pytest.approx(0.14309697506453745, abs=1e-12)


def test_prefix_of_the_hash_order_is_not_one_split() -> None:
    ids = hash_order([f"q{i}" for i in range(400)], lambda i: i)
    assert ids == hash_order(sorted(ids), lambda i: i)
    first = Counter(choose_split("t", i, 0.5, "a", "b") for i in ids[:100])
    assert min(first.values()) > 30
