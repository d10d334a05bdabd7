"""Verification loses nothing: every output distribution is enumerated exactly and compared with the target's.

Bugs that others have shipped are planted into the real functions, and the same comparison must reject them.
"""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.decoding import verify as verify_module
from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.sampling import Randomness, Sampling, TokenChooser, probabilities
from eagle3.decoding.verify import Verdict, accept_chain, follow, verify
from tests.decoding.enumeration import enumerate_outcomes

VOCAB = 3
ROOT = 0
Verify = Callable[[DraftTree, Tensor, TokenChooser], Verdict]
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.3, top_k=2),
    Sampling(temperature=0.9, top_p=0.8),
    Sampling(temperature=1.5, top_k=2, top_p=0.8),
]


@cache
def table(path: tuple[int, ...], salt: int) -> Tensor:
    """Random logits [VOCAB] of a 'model' after a path; a different model for every salt."""
    seed = hash((path, salt)) % 2**31
    return 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def target_logits(path: tuple[int, ...]) -> Tensor:
    return table(path, salt=1)


def draft_logits(path: tuple[int, ...]) -> Tensor:
    return table(path, salt=2)


def likeliest(path: tuple[int, ...], count: int) -> list[int]:
    return draft_logits(path).topk(count).indices.tolist()


def chain_tree(prefix: tuple[int, ...]) -> DraftTree:
    tokens = [prefix[-1]]
    for _ in range(2):
        tokens.append(likeliest((*prefix, *tokens[1:]), 1)[0])
    return DraftTree.chain(tokens)


def bushy_tree(prefix: tuple[int, ...]) -> DraftTree:
    """Two children of the root, two of the first, one of the second, one of a grandchild."""
    first = likeliest(prefix, 2)
    below = likeliest((*prefix, first[0]), 2)
    other = likeliest((*prefix, first[1]), 1)
    deep = likeliest((*prefix, first[0], below[1]), 1)
    return DraftTree((prefix[-1], *first, *below, *other, *deep), (-1, 0, 0, 1, 1, 2, 4))


def wide_tree(prefix: tuple[int, ...]) -> DraftTree:
    return DraftTree((prefix[-1], *likeliest(prefix, 2)), (-1, 0, 0))


DETERMINISTIC = [chain_tree, bushy_tree, wide_tree]


def sampled_chain(
    prefix: tuple[int, ...], count: int, sampling: Sampling, randomness: Randomness
) -> DraftTree:
    tokens, drawn_from = [prefix[-1]], []
    for _ in range(count):
        drawn_from.append(probabilities(draft_logits((*prefix, *tokens[1:])), sampling))
        tokens.append(randomness.draw(drawn_from[-1]))
    return DraftTree.chain(tokens, drawn_from)


def decode(
    draft: Callable[[tuple[int, ...]], DraftTree], check: Verify, choose: TokenChooser, length: int
) -> tuple[int, ...]:
    """The engine's loop over the tables, until `length` tokens follow the root."""
    tokens: tuple[int, ...] = (ROOT,)
    while len(tokens) <= length:
        tree = draft(tokens)
        paths = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree.tokens))]
        logits = torch.stack([target_logits((*tokens, *path)) for path in paths])
        verdict = check(tree, logits, choose)
        tokens += (*(tree.tokens[node] for node in verdict.path[1:]), verdict.bonus)
    return tokens[1 : length + 1]


def expected_distribution(sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    result = {}
    for answer in itertools.product(range(VOCAB), repeat=length):
        probability = 1.0
        for i, token in enumerate(answer):
            probability *= float(probabilities(target_logits((ROOT, *answer[:i])), sampling)[token])
        if probability > 0:
            result[answer] = probability
    return result


def distance(got: dict[Any, float], expected: dict[Any, float]) -> float:
    """Total variation distance."""
    return sum(abs(got.get(key, 0) - expected.get(key, 0)) for key in {*got, *expected}) / 2


def tree_distance(
    draft: Callable[[tuple[int, ...]], DraftTree], check: Verify, sampling: Sampling, length: int = 3
) -> float:
    outcomes = enumerate_outcomes(lambda r: decode(draft, check, TokenChooser(sampling, r), length))
    return distance(outcomes, expected_distribution(sampling, length))


def chain_distance(check: Verify, sampling: Sampling, drafted_with: Sampling) -> float:
    """The larger of the distances for chains of one and of two sampled tokens."""

    def run(randomness: Randomness, count: int) -> tuple[int, ...]:
        return decode(
            lambda prefix: sampled_chain(prefix, count, drafted_with, randomness),
            check,
            TokenChooser(sampling, randomness),
            length=2,
        )

    expected = expected_distribution(sampling, 2)
    return max(
        distance(enumerate_outcomes(lambda r: run(r, count)), expected)  # noqa: B023
        for count in (1, 2)
    )


EXACT = 1e-5  # float32 probabilities
WRONG = 1e-2


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("draft", DETERMINISTIC)
def test_tree_output_has_the_targets_distribution(
    draft: Callable[[tuple[int, ...]], DraftTree], sampling: Sampling
) -> None:
    assert tree_distance(draft, verify, sampling) < EXACT


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_chain_output_has_the_targets_distribution(sampling: Sampling) -> None:
    assert chain_distance(verify, sampling, drafted_with=sampling) < EXACT


def test_sampled_chain_may_be_drawn_from_any_distribution() -> None:
    # Lossless whatever q is, as long as it is the q that the tokens were drawn from.
    assert chain_distance(verify, SAMPLINGS[1], drafted_with=Sampling(temperature=2.5)) < EXACT


@pytest.mark.parametrize("draft", DETERMINISTIC)
def test_greedy_output_is_the_targets_argmax(draft: Callable[[tuple[int, ...]], DraftTree]) -> None:
    expected: tuple[int, ...] = ()
    for _ in range(6):
        expected += (int(target_logits((ROOT, *expected)).argmax()),)
    assert decode(draft, verify, TokenChooser(Sampling()), 6) == expected


def test_greedy_takes_the_longest_matching_path() -> None:
    tree = DraftTree((9, 1, 2, 3, 1, 0), (-1, 0, 0, 2, 3, 3))
    after = {0: 2, 2: 3, 3: 1, 4: 7}
    verdict = follow(tree, after.__getitem__)
    assert verdict.path == [0, 2, 3, 4]
    assert verdict.bonus == 7


def test_drawing_once_equals_the_recursive_rejection_rule() -> None:
    """The papers' rule for point-mass drafts, written out, gives the same accepted paths and bonus tokens."""

    def recursive_rejection(tree: DraftTree, logits: Tensor, choose: TokenChooser) -> Verdict:
        path = [0]
        while True:
            p = probabilities(logits[path[-1]], choose.sampling).double()
            for token, child in tree.children[path[-1]].items():
                if choose.randomness.accept(float(p[token])):
                    path.append(child)
                    break
                p[token] = 0
                p /= p.sum()
            else:
                return Verdict(path, choose.randomness.draw(p))

    for draft, sampling in itertools.product(DETERMINISTIC, SAMPLINGS):
        tree = draft((ROOT,))
        paths = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree.tokens))]
        logits = torch.stack([target_logits((ROOT, *path)) for path in paths])

        def outcomes(check: Verify) -> dict[tuple[tuple[int, ...], int], float]:
            def run(randomness: Randomness) -> tuple[tuple[int, ...], int]:
                verdict = check(tree, logits, TokenChooser(sampling, randomness))  # noqa: B023
                return tuple(verdict.path), verdict.bonus

            return enumerate_outcomes(run)

        assert distance(outcomes(verify), outcomes(recursive_rejection)) < EXACT


def test_acceptance_probability_is_the_papers() -> None:
    # Chain: the first token is accepted with probability sum(min(p, q)); tree: with the children's mass.
    sampling = SAMPLINGS[0]
    p, q = probabilities(target_logits((ROOT,)), sampling), probabilities(draft_logits((ROOT,)), sampling)

    def run_chain(randomness: Randomness) -> int:
        token = randomness.draw(q)
        return len(accept_chain([token], [q], lambda _: p, randomness).path) - 1

    assert enumerate_outcomes(run_chain)[1] == pytest.approx(float(torch.minimum(p, q).sum()), abs=EXACT)

    tree = wide_tree((ROOT,))
    logits = torch.stack([target_logits((ROOT,)), *[torch.zeros(VOCAB)] * 2])
    accepted: dict[int, float] = defaultdict(float)
    for path, probability in enumerate_outcomes(
        lambda r: tuple(verify(tree, logits, TokenChooser(sampling, r)).path)
    ).items():
        accepted[len(path) - 1] += probability
    assert accepted[1] == pytest.approx(float(p[likeliest((ROOT,), 2)].sum()), abs=EXACT)


def test_residual_lost_in_rounding_falls_back_to_the_target() -> None:
    class Reject(Randomness):
        def accept(self, probability: float) -> bool:
            return False

    p = torch.tensor([0.5, 0.5])
    assert accept_chain([0], [p], lambda _: p, Reject(0)).bonus in (0, 1)


# --- planted bugs ---


def planted(function: Callable[..., Any], right: str, wrong: str) -> Callable[..., Any]:
    """The function with one expression of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{right!r} is not in {function.__name__} exactly once"
    namespace = dict(vars(inspect.getmodule(function)))
    exec(compile(source.replace(right, wrong), f"planted:{wrong}", "exec"), namespace)
    mutant = namespace[function.__name__]
    assert isinstance(mutant, FunctionType)
    return mutant


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("(p - q).clamp_(min=0)", "p", id="residual is p, not max(0, p - q)"),
        pytest.param("(p - q).clamp_(min=0)", "(q - p).clamp_(min=0)", id="residual is max(0, q - p)"),
        pytest.param("float(p[token]) / float(q[token])", "float(q[token]) / float(p[token])", id="q / p"),
        pytest.param("float(p[token]) / float(q[token])", "float(p[token])", id="q is not divided by"),
        pytest.param("target(len(drafted))", "draft[-1]", id="bonus from the draft"),
        pytest.param("target(len(drafted))", "target(0)", id="bonus from another node"),
        pytest.param("p = target(i)", "p = target(i + 1)", id="p of the token after"),
        pytest.param("range(i + 1)", "range(i)", id="one accepted token forgotten"),
    ],
)
def test_bug_in_the_chain_rule_is_caught(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = planted(accept_chain, right, wrong)
    monkeypatch.setattr(verify_module, "accept_chain", mutant)
    try:
        found = chain_distance(verify, SAMPLINGS[0], drafted_with=SAMPLINGS[0])
    except (AssertionError, IndexError):
        return  # not even a distribution
    assert found > WRONG


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        pytest.param("verify", "choose(logits[node])", "choose(logits[max(node - 1, 0)])", id="wrong parent"),
        pytest.param(
            "verify", "choose(logits[node])", "choose(logits[0])", id="always the root's distribution"
        ),
        pytest.param("verify", "choose(logits[node])", "int(logits[node].argmax())", id="greedy at T > 0"),
        pytest.param(
            "verify",
            "choose(logits[node])",
            "TokenChooser(Sampling(temperature=1.0), choose.randomness)(logits[node])",
            id="temperature, top-k and top-p left out",
        ),
        pytest.param(
            "follow",
            "return Verdict(path, token)",
            "return Verdict(path, tree.tokens[path[-1]])",
            id="bonus is the last accepted token",
        ),
        pytest.param(
            "follow",
            ".get(token)",
            ".get(token, next(iter(tree.children[path[-1]].values()), None))",
            id="best child accepted without a match",
        ),
    ],
)
@pytest.mark.parametrize("sampling", [SAMPLINGS[1], SAMPLINGS[4]], ids=str)
def test_bug_in_the_tree_rule_is_caught(
    name: str, right: str, wrong: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "Sampling", Sampling, raising=False)
    mutant = planted(getattr(verify_module, name), right, wrong)
    if name == "follow":
        monkeypatch.setattr(verify_module, "follow", mutant)
        mutant = verify
    assert tree_distance(bushy_tree, mutant, sampling) > WRONG


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
@pytest.mark.parametrize("draft", DETERMINISTIC)
def test_unprocessed_bonus_token_is_caught(
    draft: Callable[[tuple[int, ...]], DraftTree], sampling: Sampling
) -> None:
    """A rule that samples the bonus at temperature 1, as a released engine did."""

    def unprocessed_bonus(tree: DraftTree, logits: Tensor, choose: TokenChooser) -> Verdict:
        def token_after(node: int) -> int:
            if tree.children[node]:
                return choose(logits[node])
            return choose.randomness.draw(logits[node].softmax(0))

        return follow(tree, token_after)

    assert tree_distance(draft, unprocessed_bonus, sampling) > WRONG


@pytest.mark.parametrize("bug", ["sibling not zeroed", "not renormalised", "residual not zeroed"])
def test_bug_in_a_sibling_rule_is_caught(bug: str) -> None:
    """The classic mistakes of the recursive rule change the output enough for this comparison to see."""

    def buggy(tree: DraftTree, logits: Tensor, choose: TokenChooser) -> Verdict:
        path = [0]
        while True:
            original = probabilities(logits[path[-1]], choose.sampling).double()
            p = original.clone()
            for token, child in tree.children[path[-1]].items():
                if choose.randomness.accept(float(p[token])):
                    path.append(child)
                    break
                if bug != "sibling not zeroed":
                    p[token] = 0
                if bug != "not renormalised":
                    p /= p.sum()
            else:
                rest = original if bug == "residual not zeroed" else p
                return Verdict(path, choose.randomness.draw(rest))

    assert tree_distance(wide_tree, buggy, SAMPLINGS[0]) > WRONG


def test_draft_distribution_other_than_the_one_drawn_from_is_caught() -> None:
    def check(tree: DraftTree, logits: Tensor, choose: TokenChooser) -> Verdict:
        assert tree.draft_probabilities is not None
        flat = tuple(q.sqrt() / q.sqrt().sum() for q in tree.draft_probabilities)
        return verify(DraftTree(tree.tokens, tree.parents, flat), logits, choose)

    assert chain_distance(check, SAMPLINGS[0], drafted_with=SAMPLINGS[0]) > WRONG
