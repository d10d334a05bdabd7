"""The draft of speculative sampling: some of the target's layers, trained, or a model of its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from eagle3.models.checkpoint import MANIFEST
from eagle3.models.draft import check_start_layers
from eagle3.models.formats import read_config
from eagle3.models.prepare import prepare_target, read_source
from eagle3.models.target import Target
from eagle3.provenance import write_json


class IndependentModule(nn.Module):
    """The trained part: decoder layers and final norm. Embedding and head stay the target's.

    Args:
        target: gives the architecture and the layers to start from.
        layers: which of the target's layers, ascending; as many as the small model has.

    Raises:
        ValueError: for layers that the target does not have.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        super().__init__()
        check_start_layers("layers", layers, target.num_layers)
        self.config = _with_layers(target.config, layers)
        self.body = AutoModel.from_config(self.config)
        self.body.embed_tokens = nn.Identity()  # the target's, frozen, is used from outside
        source = target.model.model
        for mine, index in zip(self.body.layers, layers, strict=True):
            mine.load_state_dict(source.layers[index].state_dict())
        self.body.norm.load_state_dict(source.norm.state_dict())

    def forward(self, embedded: Tensor) -> Tensor:
        """Embedded tokens [B, T, H] -> normed hidden states [B, T, H], the head's input. Causal."""
        hidden: Tensor = self.body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden


def save_independent(
    folder: Path, module: IndependentModule, target: Target, manifest: Mapping[str, Any]
) -> None:
    """Write a complete Hugging Face model with the target's tokenizer; the manifest comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_config(module.config)
    state = {f"model.{name}": tensor for name, tensor in module.body.state_dict().items()}
    state["model.embed_tokens.weight"] = target.embed_weight
    state["lm_head.weight"] = target.lm_head_weight
    model.load_state_dict(state)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    write_json(folder / MANIFEST, dict(manifest))


def import_independent(source: str, folder: Path, target: Target, file: str | None = None) -> None:
    """Bring a smaller language model with the target's tokenizer into `folder`, to draft with as it is.

    Args:
        source, file: as in params.yaml's section target.

    Raises:
        ValueError: before its weights are downloaded, for another vocabulary; and as `prepare_target`.
    """
    config, tokenizer = read_source(source, file)
    check_same_vocabulary(config.vocab_size, tokenizer, target)
    prepare_target(source, folder, file, capture_layers=(0,))
    write_json(folder / MANIFEST, {"source": source, "file": file})


def check_same_vocabulary(vocab_size: int, tokenizer: Any, target: Target) -> None:
    """Refuse a draft model whose token ids are not the target's.

    Raises:
        ValueError: on another size, or other ids for the same tokens.
    """
    same_tokens = tokenizer.get_vocab() == target.tokenizer.get_vocab()
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {vocab_size}, the target of {target.vocab_size}: "
            + (
                "their tokenizers are the same, but their heads are padded to different sizes, so that their "
                "distributions cannot be compared; take a draft model with a head of the target's size"
                if same_tokens
                else "speculative sampling needs a draft model with the target's tokenizer"
            )
        )
    if not same_tokens:
        raise ValueError(
            "the draft model's tokenizer gives other ids to tokens than the target's: speculative "
            "sampling needs a draft model with the target's tokenizer"
        )


def load_independent(folder: Path, weights: torch.dtype, device: torch.device | str) -> Target:
    """A small model ready to draft with; `decoding.independent_drafter` checks that it fits the target.

    Raises:
        ValueError: if the folder holds no such model, or an EAGLE draft.
    """
    architecture = (read_config(folder).get("architectures") or [""])[0]
    if "Eagle" in architecture:
        raise ValueError(
            f"{folder}: holds an {architecture} draft, which cannot decode by itself; speculative sampling "
            "needs a whole language model: a draft of family independent, or any smaller model of the same "
            "tokenizer"
        )
    dtype = torch.float32 if weights == torch.int8 else weights
    return Target.load(folder, dtype, str(device), capture_layers=(0,), held=weights)


def _with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    smaller = copy.deepcopy(config)
    smaller.num_hidden_layers = len(layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        smaller.layer_types = [kinds[index] for index in layers]
    return smaller
