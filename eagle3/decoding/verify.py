"""Verification: which drafted tokens are kept, so that the output is exactly the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from eagle3.decoding.draft_tree import DraftTree
from eagle3.decoding.sampling import Randomness, TokenChooser, probabilities


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes from the root on (the root itself included), and the token that follows the last."""

    path: list[int]
    bonus: int


def verify(tree: DraftTree, logits: Tensor, choose: TokenChooser) -> Verdict:
    """Accept drafted tokens.

    Args:
        tree: N nodes.
        logits: the target's logits at each node, [N, V]. Only rows on the accepted path are processed.
        choose: greedy or sampled choice.
    """
    if tree.draft_probabilities is None or choose.sampling.greedy:
        return follow(tree, lambda node: choose(logits[node]))
    return accept_chain(
        tree.tokens[1:],
        tree.draft_probabilities,
        lambda position: probabilities(logits[position], choose.sampling),
        choose.randomness,
    )


def follow(tree: DraftTree, choose: Callable[[int], int]) -> Verdict:
    """Walk down from the root: choose the target's next token, and go on while it was drafted.

    Greedy, this is the longest path that equals the target's argmax, plus the bonus token.

    Sampled, with drafted tokens chosen deterministically, it is the recursive rejection rule of the papers in
    one step. That rule takes the children x1, x2, ... in turn, accepts x1 with probability p(x1), otherwise
    zeroes p(x1), renormalises and tries x2, and at the end samples the rest. So x1 comes out with p(x1), x2
    with (1 - p(x1)) * p(x2) / (1 - p(x1)) = p(x2), and so on; any token not drafted with its p. That is a
    sample from p, accepted if it was drafted. Drawn that way the tokens for a seed do not even depend on the
    draft. The bonus token is a sample like every other.

    Args:
        tree: any tree.
        choose: the target's token after a node; called once for each accepted node.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        child = tree.children[path[-1]].get(token)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def accept_chain(
    drafted: Sequence[int],
    draft: Sequence[Tensor],
    target: Callable[[int], Tensor],
    randomness: Randomness,
) -> Verdict:
    """Speculative sampling (arXiv 2211.17192, 2302.01318) of a chain drawn from the draft's distributions.

    Drafted token x number i is accepted with probability min(1, p(x) / q(x)); the first rejected one is
    replaced by a sample from norm(max(0, p - q)); after the last comes a sample from p.

    Args:
        drafted: n tokens; number i was sampled from `draft[i]`.
        draft: n distributions q, [V] each.
        target: the target's distribution p [V] for drafted token i, i = 0..n (n: the bonus).
        randomness: the random stream.
    """
    for i, (token, q) in enumerate(zip(drafted, draft, strict=True)):
        p = target(i)
        if randomness.accept(min(1.0, float(p[token]) / float(q[token]))):
            continue
        residual = (p - q).clamp_(min=0)
        # A rejection proves p(x) < q(x), so the residual has mass, unless it is lost in rounding.
        weights = residual if float(residual.sum()) > 0 else p
        return Verdict(list(range(i + 1)), randomness.draw(weights))
    return Verdict(list(range(len(drafted) + 1)), randomness.draw(target(len(drafted))))
