"""Draft checkpoints: the format that SGLang and vLLM read, and a refusal in words for what does not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.models import checkpoint
from eagle3.models.checkpoint import config_json, import_draft, load_draft, load_module, save_draft
from eagle3.models.draft import DraftConfig
from eagle3.models.target import Target
from tests.models.drafts import random_eagle, random_eagle3
from tests.models.families import LLAMA3_ROPE, tiny_model
from tests.tiny import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def eagle3_folder(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    save_draft(folder, random_eagle3(tiny_target), tiny_target, {"data": "abc"})
    return folder


def copied(folder: Path, destination: Path) -> Path:
    destination.mkdir()
    for path in folder.iterdir():
        (destination / path.name).write_bytes(path.read_bytes())
    return destination


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# --- the format ---


def test_tensors_of_an_eagle3_draft(eagle3_folder: Path) -> None:
    """Hidden 32, 4 heads and 2 key-value heads of 8, intermediate 64, 100 of 320 tokens, three states."""
    tensors = load_file(eagle3_folder / "model.safetensors")
    assert {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "fc.weight": ([32, 96], torch.float32),
        "midlayer.self_attn.q_proj.weight": ([32, 64], torch.float32),
        "midlayer.self_attn.k_proj.weight": ([16, 64], torch.float32),
        "midlayer.self_attn.v_proj.weight": ([16, 64], torch.float32),
        "midlayer.self_attn.o_proj.weight": ([32, 32], torch.float32),
        "midlayer.mlp.gate_proj.weight": ([64, 32], torch.float32),
        "midlayer.mlp.up_proj.weight": ([64, 32], torch.float32),
        "midlayer.mlp.down_proj.weight": ([32, 64], torch.float32),
        "midlayer.hidden_norm.weight": ([32], torch.float32),
        "midlayer.input_layernorm.weight": ([32], torch.float32),
        "midlayer.post_attention_layernorm.weight": ([32], torch.float32),
        "norm.weight": ([32], torch.float32),
        "lm_head.weight": ([100, 32], torch.float32),
        "d2t": ([100], torch.int64),
        "t2d": ([320], torch.bool),
    }


def test_d2t_holds_offsets_and_t2d_marks_their_targets(tiny_target: Target, tmp_path: Path) -> None:
    """Worked: draft tokens 0, 1, 2, 3 stand for 0, 2, 5, 6, so the offsets are 0, 1, 3, 3."""
    module = random_eagle3(tiny_target, size=4)
    module.set_vocabulary(torch.tensor([0, 2, 5, 6]))
    save_draft(tmp_path, module, tiny_target, {})
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [0, 1, 3, 3]
    assert tensors["t2d"].nonzero().flatten().tolist() == [0, 2, 5, 6]
    assert load_draft(tmp_path, tiny_target).draft_to_target.tolist() == [0, 2, 5, 6]


def test_fc_norm_adds_a_norm_for_each_captured_state(tiny_target: Target, tmp_path: Path) -> None:
    save_draft(tmp_path, random_eagle3(tiny_target, fc_norm=True, norm_output=True), tiny_target, {})
    tensors = load_file(tmp_path / "model.safetensors")
    assert [list(tensors[f"fc_norm.{index}.weight"].shape) for index in range(3)] == [[32]] * 3
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["fc_norm"] is True
    assert config["norm_output"] is True


def test_config_of_an_eagle3_draft(eagle3_folder: Path) -> None:
    config = json.loads((eagle3_folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": 320,
        "draft_vocab_size": 100,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    assert {key: config.get(key) for key in expected} == expected
    # Present as null, or with the default layers, each of these makes an engine take another path.
    absent = {
        "target_hidden_size",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "fc_norm",
        "norm_output",
    }
    assert not absent & set(config)


def test_config_carries_a_scaled_rope_in_both_spellings() -> None:
    target = Target(tiny_model("llama with llama3 rope"), tiny_tokenizer())
    config = config_json(DraftConfig.for_target(target, "eagle3"), target)
    assert config["rope_parameters"] == LLAMA3_ROPE
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] == {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


@pytest.mark.parametrize(("layers", "count"), [((1, 4, 6), 8), ((1, 3, 6), 6), ((1, 2, 4), 4), ((0, 8), 8)])
def test_other_layers_are_written_for_both_engines(layers: tuple[int, ...], count: int) -> None:
    """SGLang's id k is hs[k + 1], vLLM's is hs[k]; off by one loses acceptance without an error."""
    target = Target(tiny_llama(layers=count), tiny_tokenizer(), layers)
    config = config_json(DraftConfig.for_target(target, "eagle3"), target)
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    assert config["eagle_aux_hidden_state_layer_ids"] == list(layers)


def test_manifest_holds_what_was_given_and_the_layers(eagle3_folder: Path) -> None:
    manifest = json.loads((eagle3_folder / "manifest.json").read_text())
    assert manifest == {"data": "abc", "capture_layers": [2, 4, 5], "target_layers": 8}


# --- round trip ---


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}, {"num_key_value_heads": 4}])
def test_round_trip(tiny_target: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    module = random_eagle3(tiny_target, **options)
    save_draft(tmp_path, module, tiny_target, {})
    loaded = load_module(tmp_path, "eagle3")
    assert loaded.config == module.config
    assert loaded.state_dict().keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_round_trip_of_eagle(tiny_target: Target, tmp_path: Path) -> None:
    module = random_eagle(tiny_target)
    save_draft(tmp_path, module, tiny_target, {})
    loaded = load_module(tmp_path, "eagle")
    assert replace(loaded.config, num_captured=3) == module.config  # it reads none
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    draft = load_draft(tmp_path, tiny_target)
    assert draft.family == "eagle"
    assert torch.equal(draft.draft_to_target, torch.arange(320))


def test_a_kill_while_a_draft_is_replaced_leaves_none_instead_of_a_mixture(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_draft(tmp_path, random_eagle3(tiny_target), tiny_target, {})

    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_draft(tmp_path, random_eagle3(tiny_target, seed=1, norm_output=True), tiny_target, {})
    with pytest.raises(ValueError, match="has not finished"):
        load_module(tmp_path)


# --- refusals ---


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no draft there \(config\.json is missing\); train one"):
        load_module(tmp_path)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_a_draft_of_the_other_family_is_refused(tiny_target: Target, tmp_path: Path, family: str) -> None:
    """EAGLE-3 weights run in EAGLE mode accept nothing, without an error."""
    module = random_eagle3(tiny_target) if family == "eagle3" else random_eagle(tiny_target)
    save_draft(tmp_path, module, tiny_target, {})
    other = "eagle" if family == "eagle3" else "eagle3"
    with pytest.raises(
        ValueError,
        match=f"but '{other}' was asked for.*name a draft of family '{other}', or ask for '{family}'",
    ):
        load_draft(tmp_path, tiny_target, other)
    assert load_draft(tmp_path, tiny_target, family).family == family


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["MedusaModel"]}, "architectures .*MedusaModel.* is no draft"),
    "no architecture": ({"architectures": None}, "architectures None is no draft"),
    "no draft vocabulary size": ({"draft_vocab_size": None}, "draft_vocab_size is missing"),
    "no hidden size": ({"hidden_size": None}, "hidden_size is missing"),
    "no rope theta": (
        {"rope_theta": None, "rope_parameters": None},
        "rope_theta is missing.*add the one it was trained with",
    ),
    "another draft vocabulary size": ({"draft_vocab_size": 90}, r"lm_head.weight is \[100, 32\].*\[90, 32\]"),
    "another hidden size": (
        {"hidden_size": 48},
        r"fc\.weight is \[32, 96\], config\.json asks for \[48, 96\]",
    ),
    "another number of heads": (
        {"num_key_value_heads": 4},
        r"k_proj.weight is \[16, 64\].*asks for \[32, 64\]",
    ),
    "an option that the weights lack": ({"fc_norm": True}, r"fc_norm\.0\.weight is missing"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_configs_that_do_not_fit_are_refused(eagle3_folder: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED_CONFIGS[name]
    folder = copied(eagle3_folder, tmp_path / "draft")
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        load_module(folder)
    assert str(folder) in str(refused.value)


def test_rope_theta_is_found_in_either_spelling(eagle3_folder: Path, tmp_path: Path) -> None:
    for number, key in enumerate(("rope_theta", "rope_parameters")):
        folder = copied(eagle3_folder, tmp_path / str(number))
        change_config(folder, **{key: None})
        assert load_module(folder).config.rope_parameters["rope_theta"] == 10000.0


def test_rope_theta_left_unsaid_is_read_where_both_readings_agree(
    eagle3_folder: Path, tmp_path: Path
) -> None:
    """Published EAGLE drafts of Llama 2 name none: transformers' default and the target's are both 10,000."""
    folder = copied(eagle3_folder, tmp_path / "draft")
    change_config(folder, rope_theta=None, rope_parameters=None)
    load_draft(folder, Target(tiny_llama(), tiny_tokenizer()))
    other = tiny_llama()
    other.config.rope_parameters["rope_theta"] = 500000.0
    with pytest.raises(ValueError, match=r"rope_theta is missing.*add the one it was trained with"):
        load_draft(folder, Target(other, tiny_tokenizer()))


def remove(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def spoil(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors["norm.weight"].fill_(value)


REFUSED_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a missing tensor": (remove("midlayer.mlp.up_proj.weight"), r"midlayer\.mlp\.up_proj\.weight is missing"),
    "a missing fusion": (remove("fc.weight"), r"fc\.weight is missing"),
    "an unknown tensor": (put("extra.weight", torch.ones(1)), r"extra\.weight is unknown"),
    "a tensor of another shape": (
        put("norm.weight", torch.ones(31)),
        r"norm\.weight is \[31\].*asks for \[32\]",
    ),
    "not a number": (spoil(float("nan")), r"norm\.weight holds values that are not finite"),
    "infinity": (spoil(float("inf")), r"norm\.weight holds values that are not finite"),
    "no mapping": (remove("d2t"), "d2t is missing"),
    "an all-zero mapping": (put("d2t", torch.zeros(100, dtype=torch.int64)), "d2t is all zero for a reduced"),
    "absolute ids as a mapping": (
        put("d2t", torch.arange(0, 300, 3)),
        "outside the target's 320|absolute ids",
    ),
    "a mask of other tokens": (put("t2d", torch.arange(320) < 100), "t2d does not mark the tokens"),
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_refused(eagle3_folder: Path, tmp_path: Path, name: str) -> None:
    change, message = REFUSED_TENSORS[name]
    folder = copied(eagle3_folder, tmp_path / "draft")
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message) as refused:
        load_module(folder)
    assert str(folder) in str(refused.value)


def test_all_problems_are_named_at_once(eagle3_folder: Path, tmp_path: Path) -> None:
    folder = copied(eagle3_folder, tmp_path / "draft")
    change_tensors(folder, remove("norm.weight"))
    change_tensors(folder, put("final_norm.weight", torch.ones(32)))
    with pytest.raises(ValueError, match=r"norm\.weight is missing; final_norm\.weight is unknown"):
        load_module(folder)


def test_a_full_vocabulary_needs_no_offsets(tiny_target: Target, tmp_path: Path) -> None:
    module = random_eagle3(tiny_target, size=320)
    assert not module.d2t.any()
    save_draft(tmp_path, module, tiny_target, {})
    assert torch.equal(load_draft(tmp_path, tiny_target).draft_to_target, torch.arange(320))


def test_a_draft_for_another_hidden_size_is_refused(eagle3_folder: Path) -> None:
    other = Target(tiny_llama(hidden_size=48), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"hidden size 32 \(target: 48\)"):
        load_draft(eagle3_folder, other)


def test_the_draft_of_a_7b_target_is_refused_by_a_13b_target_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    """Llama-2-7b-chat's published EAGLE draft beside Llama-2-13b-chat: hidden sizes 4096 and 5120."""
    published = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    target = copy.copy(Target(tiny_llama(), tiny_tokenizer()))
    target.hidden_size, target.vocab_size = 5120, 32000  # of 13 billion parameters only the sizes matter
    for load in (load_draft, partial(import_draft, folder=tmp_path / "out", manifest={})):
        with pytest.raises(ValueError, match=r"has hidden size 4096 \(target: 5120\); train a draft for"):
            load(tmp_path, target=target)


def test_a_draft_for_a_target_of_another_depth_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """An EAGLE draft reads the top layer alone: only the manifest tells how many lie below it."""
    save_draft(tmp_path, random_eagle(tiny_target), tiny_target, {})
    deeper = Target(tiny_llama(layers=9), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"number of target layers 8 \(target: 9\); train a draft for"):
        load_draft(tmp_path, deeper)
    (tmp_path / "manifest.json").unlink()  # published drafts have none
    load_draft(tmp_path, deeper)


def test_a_draft_for_another_vocabulary_is_refused(eagle3_folder: Path) -> None:
    other = Target(tiny_llama(vocab_size=352), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"vocabulary size 320 \(target: 352\)"):
        load_draft(eagle3_folder, other)


def test_a_draft_of_other_captured_layers_is_refused(eagle3_folder: Path, tmp_path: Path) -> None:
    """A layer beside the right one costs acceptance without an error."""
    other = Target(tiny_llama(), tiny_tokenizer(), (2, 4, 6))
    with pytest.raises(
        ValueError, match=r"trained on the hidden states \[2, 4, 5\], the target gives \[2, 4, 6\]"
    ):
        load_draft(eagle3_folder, other)
    fewer = Target(tiny_llama(), tiny_tokenizer(), (2, 4))
    folder = copied(eagle3_folder, tmp_path / "draft")
    (folder / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r"trained on the hidden states \[2, 4, 5\], the target gives \[2, 4\]"
    ):
        load_draft(folder, fewer)


@pytest.mark.parametrize("make", [random_eagle3, random_eagle], ids=["eagle3", "eagle"])
@pytest.mark.parametrize(("held", "tolerance"), [(torch.bfloat16, 0.02), (torch.int8, 0.03)], ids=str)
def test_weights_can_be_held_in_fewer_bits(
    tiny_target: Target, tmp_path: Path, make: Callable[..., Any], held: torch.dtype, tolerance: float
) -> None:
    """Activations and results stay float32 and near those of the float32 draft, the head's included."""
    save_draft(tmp_path, make(tiny_target), tiny_target, {})
    hidden, ids = torch.randn(1, 2, 32), torch.tensor([[1, 2]])
    logits = []
    for weights in (None, held):
        draft = load_draft(tmp_path, tiny_target, weights=weights)
        output = draft.forward(ids, hidden, torch.arange(2)[None], draft.new_cache(4))
        assert output.hidden.dtype == torch.float32
        assert output.logits is not None
        logits.append(output.logits)
    difference = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < difference < tolerance
