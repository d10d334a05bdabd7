"""Drafts of other projects: the same weights under their names are the same draft; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.models.checkpoint import load_draft, load_module, save_draft
from eagle3.models.draft import DraftOutput
from eagle3.models.eagle3 import Eagle3Draft
from eagle3.models.formats import capture_layers_of
from eagle3.models.target import Target
from eagle3.training.unroll import Unroll
from tests.models.drafts import random_eagle, random_eagle3
from tests.tiny import tiny_llama, tiny_tokenizer

Files = tuple[dict[str, Any], dict[str, Tensor]]


def written(target: Target, folder: Path, family: str = "eagle3", **options: Any) -> Files:
    """config.json and tensors of a random draft in this project's format."""
    module = random_eagle3(target, **options) if family == "eagle3" else random_eagle(target)
    save_draft(folder, module, target, {})
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def put(folder: Path, values: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def renamed(tensors: dict[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    result = dict(tensors)
    for old, new in pairs:
        result = {
            (new + name.removeprefix(old) if name.startswith(old) else name): tensor
            for name, tensor in result.items()
        }
    return result


def assert_same(folder: Path, original: Path, target: Target) -> None:
    """Both propose the same: every tensor landed where it belongs."""
    mine, theirs = load_module(original), load_module(folder)
    assert theirs.config == mine.config
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    load_draft(folder, target)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("model.safetensors", b"<html>", "is no safetensors file"),
    ],
)
def test_a_file_without_weights_is_said(
    tiny_target: Target, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    written(tiny_target, tmp_path / "own")
    (tmp_path / "own/model.safetensors").unlink()
    (tmp_path / "own" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_module(tmp_path / "own")


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_safeailab_eagle3(tiny_target: Target, tmp_path: Path, pickled: bool, prefix: str) -> None:
    """With the target's embedding, and with or without "model." before the names."""
    values, tensors = written(tiny_target, tmp_path / "own")
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    tensors[f"{prefix}embed_tokens.weight"] = tiny_target.embed_weight.clone()
    values["architectures"] = ["LlamaForCausalLM"]
    assert_same(put(tmp_path / "theirs", values, tensors, pickled), tmp_path / "own", tiny_target)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle"])
def test_safeailab_and_sglang_eagle(tiny_target: Target, tmp_path: Path, architecture: str) -> None:
    values, tensors = written(tiny_target, tmp_path / "own", "eagle")
    values["architectures"] = [architecture]
    tensors["embed_tokens.weight"] = tiny_target.embed_weight.clone()
    tensors["lm_head.weight"] = tiny_target.lm_head_weight.clone()
    folder = put(tmp_path / "theirs", values, tensors, pickled=True)
    assert_same(folder, tmp_path / "own", tiny_target)


def test_an_eagle_draft_whose_fc_has_no_bias(tiny_target: Target, tmp_path: Path) -> None:
    values, tensors = written(tiny_target, tmp_path / "own", "eagle")
    del tensors["fc.bias"]
    with pytest.raises(ValueError, match=r"fc\.bias is missing"):
        load_module(put(tmp_path / "unsaid", values, tensors))
    module = load_module(put(tmp_path / "said", {**values, "bias": False}, tensors))
    assert not module.fc.bias.any()


def test_speculators_eagle3(tiny_target: Target, tmp_path: Path) -> None:
    values, tensors = written(tiny_target, tmp_path / "own", norm_before_residual=True)
    own = ("draft_vocab_size", "norm_before_residual")
    nested = {key: value for key, value in values.items() if key not in (*own, "architectures")}
    theirs = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": nested,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "target_hidden_size": None,
        **{key: values[key] for key in own},
    }
    tensors = renamed(tensors, ("midlayer.", "layers.0."))
    tensors["embed_tokens.weight"] = tiny_target.embed_weight.to(torch.bfloat16)
    folder = put(tmp_path / "theirs", theirs, tensors)
    assert_same(folder, tmp_path / "own", tiny_target)
    with pytest.raises(ValueError, match=r"hidden states \[2, 4, 5\], the target gives \[2, 4, 6\]"):
        load_draft(folder, Target(tiny_llama(), tiny_tokenizer(), (2, 4, 6)))
    theirs["speculators_model_type"] = "medusa"
    with pytest.raises(ValueError, match="speculators_model_type 'medusa' is not read"):
        load_module(put(tmp_path / "medusa", theirs, tensors))


def test_norm_before_residual_is_computed_as_in_training(tiny_target: Target) -> None:
    """Against the plain formula: the normed state goes around the attention, not the state itself."""
    module = random_eagle3(tiny_target, norm_before_residual=True)
    draft = Eagle3Draft(module, tiny_target)
    captured = torch.randn(1, 5, 96)
    ids = torch.tensor([[3, 9, 27, 81, 243]])
    (unrolled,) = Unroll(module, tiny_target.embed_weight, module.config.rotary()).steps(ids, captured, 1)
    following = torch.cat((ids[:, 1:], torch.zeros(1, 1, dtype=torch.int64)), dim=1)
    cache: KVCache = draft.new_cache(8)
    output: DraftOutput = draft.forward(following, module.fuse(captured), torch.arange(5)[None], cache)
    assert torch.allclose(output.hidden, unrolled, atol=1e-4)
    plain = random_eagle3(tiny_target)
    (other,) = Unroll(plain, tiny_target.embed_weight, plain.config.rotary()).steps(ids, captured, 1)
    assert not torch.allclose(other, unrolled, atol=1e-2)


def test_shards(tiny_target: Target, tmp_path: Path) -> None:
    values, tensors = written(tiny_target, tmp_path / "own")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, part_names in parts.items():
        save_file({name: tensors[name] for name in part_names}, folder / part)
    index = {"weight_map": {name: part for part, part_names in parts.items() for name in part_names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(folder, tmp_path / "own", tiny_target)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors is missing, which .*index\.json names"):
        load_module(folder)


def test_a_mapping_without_its_mask(tiny_target: Target, tmp_path: Path) -> None:
    values, tensors = written(tiny_target, tmp_path / "own")
    del tensors["t2d"]
    assert_same(put(tmp_path / "theirs", values, tensors), tmp_path / "own", tiny_target)
    tensors["d2t"] = tensors["d2t"] + torch.arange(100)  # absolute ids, read as offsets
    with pytest.raises(ValueError, match=r"t2d is missing|absolute ids"):
        load_module(put(tmp_path / "absolute", values, tensors))


def test_a_whole_vocabulary_without_a_mapping(tiny_target: Target, tmp_path: Path) -> None:
    values, tensors = written(tiny_target, tmp_path / "own", size=320)
    del tensors["d2t"], tensors["t2d"]
    assert_same(put(tmp_path / "theirs", values, tensors), tmp_path / "own", tiny_target)


def test_an_embedding_of_its_own_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    values, tensors = written(tiny_target, tmp_path / "own")
    tensors["embed_tokens.weight"] = tiny_target.embed_weight + 0.1
    with pytest.raises(ValueError, match="not the target's embedding"):
        load_draft(put(tmp_path / "trained", values, tensors), tiny_target)
    tensors["embed_tokens.weight"] = tiny_target.embed_weight[:300].clone()
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \[300, 32\], the target's \[320, 32\]"):
        load_draft(put(tmp_path / "shorter", values, tensors), tiny_target)


class Harmful:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harm"),))


def test_a_pickle_runs_no_code(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values, tensors = written(tiny_target, tmp_path / "own")
    folder = put(tmp_path / "theirs", values, {**tensors, "harm": Harmful()}, pickled=True)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="more than tensors"):
        load_module(folder)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("target_hidden_size", 64),
    ],
)
def test_options_that_are_not_computed_are_refused(
    tiny_target: Target, tmp_path: Path, key: str, value: object
) -> None:
    values, tensors = written(tiny_target, tmp_path / "own")
    with pytest.raises(ValueError, match=f"{key} {value!r} is not supported"):
        load_module(put(tmp_path / "theirs", {**values, key: value}, tensors))


def test_layer_ids_of_both_conventions() -> None:
    """vLLM's id k is hs[k], SGLang's is hs[k + 1]; both stand for hs[2], hs[15], hs[27] here."""
    assert capture_layers_of({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}) == (2, 15, 27)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    assert capture_layers_of(nested) == (2, 15, 27)
    assert capture_layers_of({}) is None
