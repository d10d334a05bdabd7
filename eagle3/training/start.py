"""Where a draft's weights start: from the target's own head, norm and layers."""

from __future__ import annotations

from typing import Any

import torch

from eagle3.models.eagle import EagleLayer, EagleModule
from eagle3.models.eagle3 import Eagle3Module
from eagle3.models.target import Target


@torch.no_grad()
def start_eagle3(module: Eagle3Module, target: Target, seed: int) -> None:
    """Start an EAGLE-3 draft from the target.

    Head rows and final norm are the target's, the fused state is its deepest captured layer, and MLP and
    norms are those of its last layer; the attention is random.
    """
    _randomise(module, seed)
    width = module.config.hidden_size
    module.lm_head.weight.copy_(target.lm_head_weight[module.draft_to_target])
    module.norm.weight.copy_(target.model.model.norm.weight)
    module.fc.weight[:, -width:] += torch.eye(width)
    source = target.model.model.layers[-1]
    layer = module.midlayer
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    _copy_mlp(layer.mlp, source.mlp)


@torch.no_grad()
def start_eagle(module: EagleModule, target: Target, seed: int) -> None:
    """Start an EAGLE draft: `fc` passes the feature on, the decoder layer is the target's last."""
    _randomise(module, seed)
    width = module.config.hidden_size
    module.fc.bias.zero_()
    module.fc.weight[:, width:] += torch.eye(width)
    layer = module.layers[0]
    assert isinstance(layer, EagleLayer)
    _copy_mlp(layer.mlp, target.model.model.layers[-1].mlp)


def _copy_mlp(mlp: Any, source: Any) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        mine, theirs = getattr(mlp, name).weight, getattr(source, name).weight
        if mine.shape == theirs.shape:
            mine.copy_(theirs)


def _randomise(module: torch.nn.Module, seed: int) -> None:
    """Every matrix from a normal distribution of variance 1 / inputs, seeded; norms stay at one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
