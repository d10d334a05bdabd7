"""Drafts on disk: config.json and model.safetensors as SGLang and vLLM read them, and a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.data.vocabulary import check_mapping
from eagle3.models.draft import Draft, DraftConfig, check_fits, check_sizes
from eagle3.models.eagle import EagleDraft, EagleModule
from eagle3.models.eagle3 import Eagle3Draft, Eagle3Module
from eagle3.models.formats import (
    ARCHITECTURES,
    CONFIG,
    WEIGHTS,
    DraftFiles,
    capture_layers_of,
    check_embedding,
    read_draft_files,
    read_values,
)
from eagle3.models.target import Target, published_capture_layers
from eagle3.provenance import replacing, write_json

MANIFEST = "manifest.json"
_UNSAID_THETA = 10000.0  # what transformers takes for a Llama whose config.json names no rope_theta
DraftModule = Eagle3Module | EagleModule


def save_draft(folder: Path, module: DraftModule, target: Target, manifest: Mapping[str, Any]) -> None:
    """Write a trained draft. The weights come last, so a folder with weights is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).unlink(missing_ok=True)
    write_json(folder / CONFIG, config_json(module.config, target))
    made_for = {"capture_layers": list(target.capture_layers), "target_layers": target.num_layers}
    write_json(folder / MANIFEST, {**manifest, **made_for})
    state = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    with replacing(folder / WEIGHTS) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})


def import_draft(source: Path, folder: Path, target: Target, manifest: Mapping[str, Any]) -> None:
    """Bring a draft that somebody else trained for this target into `folder`, in this project's format.

    Raises:
        ValueError: as `load_draft`.
    """
    module = _load_for(source, target, None)
    check_fits(module.config, target)
    save_draft(folder, module, target, manifest)


def config_json(config: DraftConfig, target: Target) -> dict[str, Any]:
    """The config.json of a draft, with both spellings of the rotary settings and of the layer ids.

    The engines count layers differently: SGLang's id k stands for hs[k + 1], vLLM's for hs[k]; each reads its
    own key and ignores the other's. With EAGLE-3's default layers both are left out.
    """
    rope = config.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    result: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": dict(rope),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "dtype": "float32",
    }
    if config.family == "eagle3":
        result["draft_vocab_size"] = config.draft_vocab_size
        for option in ("fc_norm", "norm_output", "norm_before_residual"):
            if getattr(config, option):
                result[option] = True
        if not config.fused:
            result["eagle_config"] = {"use_aux_hidden_state": False}
        elif target.capture_layers != published_capture_layers(target.num_layers):
            layers = list(target.capture_layers)
            result["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
            result["eagle_aux_hidden_state_layer_ids"] = layers
    return result


def load_module(folder: Path, family: str | None = None) -> DraftModule:
    """Read the weights of a draft, in this project's format or one of those that `models.formats` reads.

    Args:
        family: "eagle3" or "eagle" where the caller needs that one.

    Raises:
        ValueError: if the folder holds no draft or one of another family, or its tensors are missing,
            unknown, of another shape, not finite, or its reduced vocabulary has no usable mapping.
    """
    return _build(folder, read_draft_files(folder), family, None)


def _build(folder: Path, files: DraftFiles, family: str | None, target: Target | None) -> DraftModule:
    found = files.family
    if family is not None and family != found:
        raise ValueError(
            f"{folder}: holds an {ARCHITECTURES[found]} draft, but {family!r} was asked for; run as the "
            f"wrong family it would accept nothing, without an error; name a draft of family {family!r}, or "
            f"ask for {found!r}"
        )
    theta = None if target is None else target.config.rope_parameters.get("rope_theta")
    config = _draft_config(files.values, found, files.tensors, folder, theta)
    module: DraftModule = Eagle3Module(config) if found == "eagle3" else EagleModule(config)
    _check_tensors(module, files)
    module.load_state_dict(files.tensors)
    if isinstance(module, Eagle3Module):
        check_mapping(module.d2t, module.t2d, config.vocab_size, str(files.weights))
    return module


def load_draft(
    folder: Path,
    target: Target,
    family: str | None = None,
    weights: torch.dtype | None = None,
    compiled: bool = True,
) -> Draft:
    """A draft ready to decode with `target`.

    Raises:
        ValueError: as `load_module`, and where the draft was trained for another target or other captured
            layers.
    """
    module = _load_for(folder, target, family)
    if isinstance(module, Eagle3Module):
        return Eagle3Draft(module, target, weights, compiled)
    return EagleDraft(module, target, weights, compiled)


def _load_for(folder: Path, target: Target, family: str | None) -> DraftModule:
    """The module, its layers and embedding checked against the target; the rest `check_fits` does."""
    values = read_values(folder)
    if values.get("hidden_size") and values.get("vocab_size"):  # what is missing is reported with the rest
        layers_of_target = _manifest(folder).get("target_layers")
        check_sizes(int(values["hidden_size"]), int(values["vocab_size"]), layers_of_target, target)
    files = read_draft_files(folder)
    module = _build(folder, files, family, target)
    if isinstance(module, Eagle3Module) and module.config.fused:
        layers = _trained_on(folder, files) or published_capture_layers(target.num_layers)
        if len(layers) == module.config.num_captured and layers != target.capture_layers:
            raise ValueError(
                f"{folder}: trained on the hidden states {list(layers)}, the target gives "
                f"{list(target.capture_layers)}; set target.capture_layers to {list(layers)}"
            )
    check_embedding(files, target.embed_weight)
    return module


def _trained_on(folder: Path, files: DraftFiles) -> tuple[int, ...] | None:
    """The hidden states that `fc` was trained on, of the manifest or config.json.

    None where neither names them: then they are the published ones.
    """
    layers = _manifest(folder).get("capture_layers")
    return capture_layers_of(files.values) if layers is None else tuple(layers)


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a draft; empty for one that another project stored."""
    path = folder / MANIFEST
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return result


def _draft_config(
    values: Mapping[str, Any],
    family: str,
    tensors: Mapping[str, Tensor],
    folder: Path,
    target_theta: float | None,
) -> DraftConfig:
    """The shape of a draft as its config.json says; `target_theta` is the target's rotary base."""
    needed = ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
    if family == "eagle3":
        needed.append("draft_vocab_size")
    missing = [key for key in needed if values.get(key) is None]
    if missing:
        raise ValueError(
            f"{folder}/{CONFIG}: {', '.join(missing)} is missing; the draft cannot be built without it"
        )
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))  # "type": its older name
    theta = rope.get("rope_theta", values.get("rope_theta"))
    if theta is None and target_theta == _UNSAID_THETA:
        theta = target_theta  # both readings agree: transformers' and "the target's"
    if theta is None:
        raise ValueError(
            f"{folder}/{CONFIG}: rope_theta is missing; with another base than the one it was trained with, "
            "a draft loses acceptance silently: add the one it was trained with, which is 10000 for drafts "
            f"of SafeAILab's code and the target's ({target_theta}) for others"
        )
    hidden = int(values["hidden_size"])
    fc = tensors.get("fc.weight")
    captured = fc.shape[1] // hidden if fc is not None else 1  # a missing one is reported with the rest
    heads = int(values["num_attention_heads"])
    return DraftConfig(
        family=family,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        intermediate_size=int(values["intermediate_size"]),
        vocab_size=int(values["vocab_size"]),
        draft_vocab_size=int(values.get("draft_vocab_size") or values["vocab_size"]),
        num_captured=captured,
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope_parameters={**rope, "rope_theta": theta},
        max_position_embeddings=int(values.get("max_position_embeddings") or 2048),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        fused=bool((values.get("eagle_config") or {}).get("use_aux_hidden_state", True)),
    )


def _check_tensors(module: DraftModule, files: DraftFiles) -> None:
    expected, tensors = module.state_dict(), files.tensors
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            problems.append(
                f"{name} is {list(tensor.shape)}, config.json asks for {list(expected[name].shape)}"
            )
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            problems.append(f"{name} holds values that are not finite")
    if problems:
        raise ValueError(f"{files.weights} does not fit its config.json: " + "; ".join(problems))
