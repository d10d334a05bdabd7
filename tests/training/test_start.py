"""The start: where a linear draft is exact, the untrained draft already proposes what the target chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3.models.draft import DraftConfig
from eagle3.models.eagle import EagleModule
from eagle3.models.eagle3 import Eagle3Module
from eagle3.models.target import Target
from eagle3.training.batches import Batch
from eagle3.training.objective import Eagle3Objective, EagleObjective
from eagle3.training.start import start_eagle, start_eagle3, state_scale
from tests.training.samples import eagle3_settings, eagle_settings

SCALES = torch.tensor([1.0, 30.0, 0.01]).repeat_interleave(32)


def linear_batch(target: Target, seed: int, from_captured: bool) -> Batch:
    """Rows whose next state is a fixed linear map of what the draft reads.

    From the captured states and the RMS-normalised embedding (EAGLE-3), or from the last state and the plain
    embedding (EAGLE).
    """
    maps = torch.Generator().manual_seed(7)
    captured_map = torch.randn(32, 96, generator=maps) / 96**0.5
    final_map = torch.linalg.qr(torch.randn(32, 32, generator=maps))[0] * 0.8
    embedding_map = torch.randn(32, 32, generator=maps) * 0.1
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(14, 25, (12,), generator=generator)
    longest = int(lengths.max())
    token_ids = torch.randint(3, 320, (12, longest), generator=generator)
    captured = torch.randn(12, longest, 96, generator=generator)
    final = torch.randn(12, longest, 32, generator=generator)
    embedded = target.embed_weight[token_ids]
    for t in range(longest - 1):
        if from_captured:
            normalised = torch.nn.functional.rms_norm(embedded[:, t + 1], (32,))
            final[:, t + 1] = captured[:, t] @ captured_map.T + normalised @ embedding_map.T
        else:
            final[:, t + 1] = final[:, t] @ final_map.T + embedded[:, t + 1] @ embedding_map.T
    final = final * target.model.model.norm.weight.detach() if from_captured else final
    known = torch.arange(longest)[None] < lengths[:, None] - 1
    inside = torch.arange(longest)[None] < lengths[:, None]
    return Batch(
        token_ids=token_ids * inside,
        lengths=lengths,
        answer_mask=inside,
        captured=captured * SCALES * known[..., None],
        final=final * known[..., None],
        target_argmax=torch.where(known, (final @ target.lm_head_weight.T).argmax(-1), -1),
    )


def agreement(predicted: Tensor, batch: Batch) -> float:
    """Share of positions at which token t + 2 is drafted as the target chooses it."""
    judged = torch.arange(predicted.shape[1])[None] + 2 < batch.lengths[:, None]
    goal = batch.target_argmax.roll(-1, dims=1)
    return float((predicted == goal)[judged].float().mean())


@pytest.mark.parametrize("fc_norm", [False, True])
def test_eagle3_starts_from_the_linear_solution(tiny_target: Target, fc_norm: bool) -> None:
    config = DraftConfig.for_target(tiny_target, "eagle3", 320, num_key_value_heads=4, fc_norm=fc_norm)
    module = Eagle3Module(config)
    module.set_vocabulary(torch.arange(320))
    batches = [linear_batch(tiny_target, seed, from_captured=True) for seed in range(6)]
    scale = state_scale(module, batches)
    start_eagle3(module, tiny_target, batches, scale, seed=0)
    objective = Eagle3Objective(
        module, tiny_target.embed_weight, tiny_target.lm_head_weight, eagle3_settings(), 0.5, scale
    )
    unseen = linear_batch(tiny_target, 99, from_captured=True)
    # Norms of the states' parts vary a little, which no linear map undoes.
    assert agreement(next(iter(objective.predictions(unseen, 1))), unseen) > (0.65 if fc_norm else 0.8)


def test_eagle_starts_from_the_linear_solution(tiny_target: Target) -> None:
    module = EagleModule(DraftConfig.for_target(tiny_target, "eagle"))
    batches = [linear_batch(tiny_target, seed, from_captured=False) for seed in range(6)]
    start_eagle(module, tiny_target, batches, seed=0)
    objective = EagleObjective(
        module,
        tiny_target.embed_weight,
        tiny_target.lm_head_weight,
        torch.arange(320),
        eagle_settings(feature_noise=0.0),
        0.5,
    )
    unseen = linear_batch(tiny_target, 99, from_captured=False)
    first, second = objective.predictions(unseen, 2)
    assert agreement(first, unseen) > 0.95
    # Two steps in a row are the map applied twice: token t + 3.
    judged = torch.arange(second.shape[1])[None] + 3 < unseen.lengths[:, None]
    assert float((second == unseen.target_argmax.roll(-2, dims=1))[judged].float().mean()) > 0.9


def test_the_seed_decides_the_start(tiny_target: Target) -> None:
    batches = [linear_batch(tiny_target, 0, from_captured=True)]

    def started(seed: int) -> dict[str, Tensor]:
        module = Eagle3Module(DraftConfig.for_target(tiny_target, "eagle3", 320))
        module.set_vocabulary(torch.arange(320))
        start_eagle3(module, tiny_target, batches, torch.ones(96), seed)
        return module.state_dict()

    first, again, other = started(1), started(1), started(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(
        first["midlayer.self_attn.q_proj.weight"], other["midlayer.self_attn.q_proj.weight"]
    )


def test_state_scale_is_the_root_mean_square_without_padding(tiny_target: Target) -> None:
    module = Eagle3Module(DraftConfig.for_target(tiny_target, "eagle3", 320))
    batches = [linear_batch(tiny_target, seed, from_captured=True) for seed in range(6)]
    known = torch.cat(
        [
            batch.captured[row, : length - 1]
            for batch in batches
            for row, length in enumerate(batch.lengths.tolist())
        ]
    )
    torch.testing.assert_close(state_scale(module, batches), known.square().mean(0).sqrt())
    assert float(state_scale(module, batches)[32:64].mean()) == pytest.approx(30, rel=0.1)


def test_states_that_the_draft_normalises_itself_are_not_scaled(tiny_target: Target) -> None:
    module = Eagle3Module(DraftConfig.for_target(tiny_target, "eagle3", 320, fc_norm=True))
    assert torch.equal(
        state_scale(module, [linear_batch(tiny_target, 0, from_captured=True)]), torch.ones(96)
    )
