"""Draft files of other projects, brought into this project's own form before anything is built from them.

Read are SGLang's and SafeAILab's EAGLE and EAGLE-3 folders (names with or without "model.", safetensors or
pytorch_model.bin, with or without the target's embedding, a mapping without its mask) and EAGLE-3 of
speculators (nested configuration, layers.0 for midlayer). An option that the engine does not compute is
refused: ignored, it would cost acceptance without an error.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG, WEIGHTS, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
_LFS = b"version https://git-lfs.github.com/spec/"  # what a pointer file begins with
ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLMEagle"}
# Architectures that other projects write, with the family that the tensors then tell.
_OTHERS = ("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")


@dataclass(frozen=True)
class DraftFiles:
    """A draft as read: configuration and tensors under this project's names."""

    family: str
    values: dict[str, Any]  # config.json, flattened
    tensors: dict[str, Tensor]
    embedding: Tensor | None  # [V, H], where the file brings one; it has to be the target's
    weights: Path  # where the tensors came from


def read_draft_files(folder: Path) -> DraftFiles:
    """Read a draft's folder.

    Raises:
        ValueError: if there is no draft, of a kind that is not read, or with options that are not computed.
    """
    values = read_values(folder)
    path, tensors = _read_tensors(folder)
    tensors = {_name(name): tensor for name, tensor in tensors.items() if "rotary_emb" not in name}
    embedding = tensors.pop("embed_tokens.weight", None)
    family = _family(values, tensors, folder)
    if family == "eagle3":
        tensors = {
            ("midlayer." + name.removeprefix("layers.0.")) if name.startswith("layers.0.") else name: tensor
            for name, tensor in tensors.items()
        }
        _complete_mapping(tensors, values)
    else:
        tensors.pop("lm_head.weight", None)  # the target's own
        if values.get("bias") is False and "fc.weight" in tensors:
            tensors.setdefault("fc.bias", torch.zeros(tensors["fc.weight"].shape[0]))
    _refuse_options(values, folder)
    floats = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    return DraftFiles(family, values, floats, embedding, path)


def read_family(folder: Path) -> str:
    """The family of a draft; its tensors are read only where config.json does not tell.

    Raises:
        ValueError: as `read_draft_files`, as far as it is read.
    """
    values = read_values(folder)
    _weights_file(folder)
    return _named_family(values) or read_draft_files(folder).family


def check_embedding(files: DraftFiles, embedding: Tensor) -> None:
    """Refuse a draft that brings another embedding than the target's, which drafting uses.

    Raises:
        ValueError: if it differs by more than its own precision.
    """
    mine = files.embedding
    if mine is None:
        return
    theirs = embedding.detach().to("cpu", torch.float32)
    if mine.shape != theirs.shape:
        raise ValueError(
            f"{files.weights}: embed_tokens.weight is {list(mine.shape)}, the target's {list(theirs.shape)}: "
            "the draft belongs to another target"
        )
    step = torch.finfo(mine.dtype).eps
    if not torch.allclose(mine.float(), theirs, rtol=2 * step, atol=step * float(theirs.abs().max())):
        raise ValueError(
            f"{files.weights}: embed_tokens.weight is not the target's embedding, with which this project "
            "drafts; it was trained along, or the draft belongs to another target"
        )


def capture_layers_of(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The hidden states hs[k] that a config.json names, or None for the default ones.

    vLLM's and speculators' id k, at the top level, is hs[k]; SGLang's, in eagle_config, is hs[k + 1].
    """
    layers = values.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None:
        return tuple(int(layer) for layer in layers)
    layers = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if layers is None else tuple(int(layer) + 1 for layer in layers)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a draft's folder; ValueError where there is none."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(
            f"{folder}: no draft there (config.json is missing); train one: python experiments/train.py"
        )
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def read_values(folder: Path) -> dict[str, Any]:
    """config.json in the form of SGLang's; speculators nests the layer's part and names kinds differently.

    Raises:
        ValueError: as `read_config`, and for a kind that is not read.
    """
    values = read_config(folder)
    kind = values.get("speculators_model_type")
    if kind is None:
        return values
    if kind != "eagle3":
        raise ValueError(f"{folder}/{CONFIG}: speculators_model_type {kind!r} is not read; only 'eagle3' is")
    layer = values.get("transformer_layer_config") or {}
    own = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    return {**layer, **own, "architectures": [ARCHITECTURES["eagle3"]]}


def _weights_file(folder: Path) -> Path:
    """The file that the tensors are in, or that names them; ValueError where there is none."""
    for name in (WEIGHTS, INDEX, PICKLED):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"{folder}: {WEIGHTS} is missing; the training that writes it has not finished")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: is no safetensors file ({error}); download it again") from None


def _read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    path = _weights_file(folder)
    with path.open("rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            raise ValueError(f"{path}: is a pointer of Git LFS, not the weights; run git lfs pull there")
    if path.name == WEIGHTS:
        return path, _safetensors(path)
    if path.name == INDEX:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        merged: dict[str, Tensor] = {}
        for shard in sorted(set(index.values())):
            if not (folder / shard).exists():
                raise ValueError(f"{folder}: {shard} is missing, which {INDEX} names; download it again")
            merged |= _safetensors(folder / shard)
        return path, merged
    try:
        return path, torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: holds more than tensors ({str(error).splitlines()[0]}), which could run code; "
            "convert it to safetensors where you trust it"
        ) from None


def _name(name: str) -> str:
    return name.removeprefix("model.")


def _architecture(values: Mapping[str, Any]) -> str | None:
    found: str | None = (values.get("architectures") or [None])[0]
    return found


def _named_family(values: Mapping[str, Any]) -> str | None:
    """The family that config.json names; None where only the tensors tell, or nothing does."""
    return next((key for key, name in ARCHITECTURES.items() if name == _architecture(values)), None)


def _family(values: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> str:
    if named := _named_family(values):
        return named
    architecture = _architecture(values)
    if architecture in _OTHERS and "fc.weight" in tensors:
        fused = any(name.startswith("midlayer.") or name.endswith(".hidden_norm.weight") for name in tensors)
        return "eagle3" if fused else "eagle"
    raise ValueError(
        f"{folder}/{CONFIG}: architectures {values.get('architectures')} is no draft this project reads; "
        f"expected one of {', '.join(ARCHITECTURES.values())}"
    )


def _complete_mapping(tensors: dict[str, Tensor], values: Mapping[str, Any]) -> None:
    """The mask t2d follows from the offsets d2t; without both, the vocabulary is the target's whole one."""
    vocabulary, size = values.get("vocab_size"), values.get("draft_vocab_size")
    if vocabulary is None:
        return  # reported with the rest of the configuration
    if "d2t" not in tensors and "t2d" not in tensors and size == vocabulary:
        tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)
    if "d2t" in tensors and "t2d" not in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if bool(((ids >= 0) & (ids < vocabulary)).all()):
            tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
            tensors["t2d"][ids] = True
    if "t2d" in tensors and tensors["t2d"].dtype == torch.uint8:
        tensors["t2d"] = tensors["t2d"].bool()


def _refuse_options(values: Mapping[str, Any], folder: Path) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "num_hidden_layers": (None, 1),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "hidden_act": (None, "silu"),
        "target_hidden_size": (None, values.get("hidden_size")),
    }
    for key, possible in allowed.items():
        if values.get(key) not in possible:
            raise ValueError(
                f"{folder}/{CONFIG}: {key} {values[key]!r} is not supported here (only "
                f"{' or '.join(repr(value) for value in possible if value is not None)}); drafting without "
                "it would lose acceptance silently"
            )
