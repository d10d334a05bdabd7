"""τ and n-α by hand: off-by-ones of the bonus token, the prefill token and the depth must fail here."""

import pytest

from eagle3.measure.acceptance import (
    Rounds,
    acceptance_by_context,
    acceptance_histogram,
    conditional_acceptance,
    mean_acceptance_length,
)

# A chain of 3 drafts: rounds accept 3, 0 and 1 and produce one token more each, the last one clipped to 1.
CHAIN = Rounds(produced=(4, 1, 1), accepted=(3, 0, 1), depth=(3, 3, 3), prompt_tokens=100)


def test_tau_counts_the_bonus_token_and_not_the_prefill_token() -> None:
    # 7 new tokens, of which the prefill made 1: τ = 6 / 3, not 7 / 3 and not 4 / 3.
    assert mean_acceptance_length([CHAIN]) == pytest.approx(2.0)


def test_tau_is_weighted_by_rounds_and_not_by_prompt() -> None:
    one_round = Rounds((4,), (3,), (3,), 10)
    many_rounds = Rounds((1,) * 9, (0,) * 9, (3,) * 9, 10)
    assert mean_acceptance_length([one_round, many_rounds]) == pytest.approx(13 / 10)


def test_tau_without_a_round_does_not_exist() -> None:
    assert mean_acceptance_length([Rounds((), (), (), 10)]) is None


def test_conditional_acceptance_by_depth() -> None:
    depths = conditional_acceptance([CHAIN])
    # Depth 0: all 3 rounds reach it, 2 accept. Depth 1: those 2 reach it, 1 accepts. Depth 2: 1 of 1.
    assert [(item.depth, item.reached, item.accepted) for item in depths] == [(0, 3, 2), (1, 2, 1), (2, 1, 1)]
    assert [item.rate for item in depths] == pytest.approx([2 / 3, 1 / 2, 1.0])


def test_acceptance_is_counted_before_clipping() -> None:
    # The last round accepted one draft although the limit left room for one token only.
    assert conditional_acceptance([Rounds((1,), (1,), (3,), 10)])[0].rate == 1.0


def test_a_depth_that_was_not_drafted_is_no_rejection() -> None:
    shallow_and_deep = [Rounds((2,), (1,), (1,), 10), Rounds((2,), (1,), (2,), 10)]
    # The first round stopped drafting at depth 1: it says nothing about the second draft.
    assert [(item.reached, item.accepted) for item in conditional_acceptance(shallow_and_deep)] == [
        (2, 2),
        (1, 0),
    ]


def test_conditional_acceptances_multiply_to_tau() -> None:
    # For unclipped rounds of one depth: τ = 1 + a0 + a0 a1 + a0 a1 a2.
    rounds = [
        Rounds(tuple(a + 1 for a in accepted), accepted, (3,) * 4, 5)
        for accepted in [(3, 0, 2, 1), (0, 3, 3, 2)]
    ]
    expected, product = 1.0, 1.0
    for depth in conditional_acceptance(rounds):
        product *= depth.rate
        expected += product
    assert mean_acceptance_length(rounds) == pytest.approx(expected)


def test_histogram_is_indexed_by_tokens_produced() -> None:
    assert acceptance_histogram([CHAIN]) == [0, 2, 0, 0, 1]
    assert acceptance_histogram([]) == []


def test_acceptance_by_context_uses_the_length_when_the_round_began() -> None:
    generation = Rounds(produced=(4, 1, 2), accepted=(3, 0, 1), depth=(3, 3, 3), prompt_tokens=100)
    # Rounds begin at 101, 105 and 106 tokens.
    buckets = acceptance_by_context([generation], bounds=(105, 200))
    assert [(item.low, item.high, item.rounds, item.tau) for item in buckets] == [
        (0, 105, 1, 4.0),
        (105, 200, 2, 1.5),
    ]
