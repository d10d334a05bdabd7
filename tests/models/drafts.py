"""Random draft modules of both families in which every parameter matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eagle3.models.draft import DraftConfig
from eagle3.models.eagle import EagleModule
from eagle3.models.eagle3 import Eagle3Module
from eagle3.models.target import Target

SIZE = 100


def random_eagle3(
    target: Target, seed: int = 0, size: int = SIZE, norm_before_residual: bool = False, **options: Any
) -> Eagle3Module:
    """Random weights, norms and draft vocabulary."""
    config = DraftConfig.for_target(target, "eagle3", size, **options)
    config = replace(config, norm_before_residual=norm_before_residual)
    module = Eagle3Module(config)
    _randomise(module, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(config.vocab_size, generator=generator)[:size]
    module.set_vocabulary(chosen.sort().values)
    return module


def random_eagle(target: Target, seed: int = 0, **options: Any) -> EagleModule:
    """Random weights and norms."""
    module = EagleModule(DraftConfig.for_target(target, "eagle", **options))
    _randomise(module, seed)
    return module


@torch.no_grad()
def _randomise(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 0.25, generator=generator)
