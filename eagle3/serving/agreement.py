"""The gate between the engines: equal tokens, equal acceptance round by round, equal hidden states.

A draft that an engine reads wrongly (a layer off by one, another rotary base, a mapping of offsets read as
ids) still decodes losslessly and only accepts less, which no error tells. The native engine with the same
draft, tree and float32 weights is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3.decoding.generation import Decoder, Generation
from eagle3.decoding.sampling import Sampling
from eagle3.measure.losslessness import first_divergence
from eagle3.models.target import Target
from eagle3.serving.client import Streamed
from eagle3.serving.metrics import rounds_of

# Largest difference of a captured state, relative to the largest of its layer, that float32 arithmetic in
# another order makes. Measured: 0 to 3e-6 between the engines; a neighbouring layer differs by more than 0.1.
STATE_TOLERANCE = 1e-4


@dataclass
class Agreement:
    """How the answers of a served engine compare with the native engine's."""

    compared: int = 0
    tokens_equal: bool = True
    acceptance_equal: bool = True
    differences: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(vars(self))


def agree(
    native: Decoder,
    prompts: Sequence[tuple[str, Sequence[int]]],
    answers: Sequence[Streamed],
    max_new_tokens: int,
) -> Agreement:
    """Decode the prompts greedily with the native engine and compare.

    Args:
        native: vanilla, or the same draft and tree as the server's.
        prompts: (name, token ids), in the order of the answers.

    The rounds are compared as the tokens that each of them added to the output.
    """
    result = Agreement()
    for (name, ids), answer in zip(prompts, answers, strict=True):
        mine = native.generate(ids, max_new_tokens, Sampling())
        result.compared += 1
        if mine.token_ids != answer.token_ids:
            at = first_divergence(mine.token_ids, answer.token_ids)
            result.tokens_equal = False
            result.differences.append(f"{name}: tokens differ from new token {at} on")
        elif mine.rounds and not _same_rounds(mine, answer):
            result.acceptance_equal = False
            result.differences.append(
                f"{name}: the rounds add {list(mine.acceptance_lengths)} tokens here and "
                f"{list(rounds_of(answer, 0, 0).produced)} there"
            )
    result.acceptance_equal = result.acceptance_equal and result.tokens_equal
    return result


def _same_rounds(mine: Generation, answer: Streamed) -> bool:
    """Round by round as far as the order is known (`rounds_of`), and else by SGLang's histogram."""
    histogram = answer.meta.get("spec_correct_drafts_histogram")
    if histogram is None or len(answer.produced) == answer.meta.get("spec_verify_ct"):
        return mine.acceptance_lengths == rounds_of(answer, 0, 0).produced
    accepted = [number for number, count in enumerate(histogram) for _ in range(count)]
    return sorted(mine.accepted_drafts) == accepted


def state_difference(target: Target, ids: Sequence[int], served: Tensor) -> float:
    """The largest difference of captured states, relative to the largest state of the layer.

    Args:
        target: in float32.
        served: what the server captured for the prompt, [T, n * H].

    Raises:
        ValueError: for another number of positions or layers.
    """
    with torch.inference_mode():
        tokens = torch.tensor([list(ids)], device=target.device)
        positions = torch.arange(len(ids), device=target.device)[None]
        mine = (
            target.forward(tokens, positions, target.new_cache(len(ids)), logits="none")
            .captured[0]
            .float()
            .cpu()
        )
    if mine.shape != served.shape:
        raise ValueError(
            f"the server captured states of shape {list(served.shape)}, this project {list(mine.shape)}: "
            "another number of layers or positions"
        )
    layers = len(target.capture_layers)
    difference = (mine - served).abs().view(len(ids), layers, -1)
    scale = mine.abs().view(len(ids), layers, -1).amax((0, 2))  # [layers]
    return float((difference.amax((0, 2)) / scale).max())
