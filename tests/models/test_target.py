"""The target's own forward gives what transformers gives, for every family and every way to store a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.kernels.compiled_ops import CompiledOps
from eagle3.models import target as target_module
from eagle3.models.layers import InferenceLayer
from eagle3.models.target import Target, check_capture_layers, default_capture_layers
from tests.models.families import CONFIGS, LLAMA3_ROPE, save_model, tiny_model
from tests.tiny import tiny_llama, tiny_tokenizer

PROMPT = [5, 17, 60, 3, 99, 17, 60, 41, 200, 311, 7]
KERNELS = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])


def forward(target: Target, ids: list[int], chunks: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, captured states and final state of one row, fed in pieces of the given sizes."""
    cache = target.new_cache(len(ids))
    parts = []
    start = 0
    for size in chunks or [len(ids)]:
        positions = torch.arange(start, start + size)[None]
        output = target.forward(torch.tensor([ids[start : start + size]]), positions, cache)
        assert output.logits is not None
        parts.append((output.logits, output.captured, output.final))
        start += size
    assert start == len(ids) == cache.lengths[0]
    logits, captured, final = (torch.cat(pieces, dim=1)[0] for pieces in zip(*parts, strict=True))
    return logits, captured, final


def reference(
    model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    states = output.hidden_states
    return output.logits[0], torch.cat([states[layer] for layer in layers], dim=-1)[0], states[-1][0]


# --- equality with transformers ---


@KERNELS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_hidden_states_are_those_of_transformers(name: str, tied: bool, compiled: bool) -> None:
    """All hs[k], from the embeddings (0) to the last, which is the normed one (8)."""
    layers = tuple(range(9))
    model = tiny_model(name, tie_word_embeddings=tied)
    target = Target(model, tiny_tokenizer(), layers, compiled)
    assert target.kernels == ("compiled" if compiled else "torch")
    expected = reference(model, PROMPT, layers)
    for chunks in (None, [4, 1, 1, 5]):
        for mine, theirs in zip(forward(target, PROMPT, chunks), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


def test_last_captured_state_is_the_normed_one() -> None:
    target = Target(tiny_llama(), tiny_tokenizer(), (2, 8))
    _, captured, final = forward(target, PROMPT)
    assert torch.equal(captured[:, 32:], final)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = tiny_model(name, seed=3)
    target = Target(model, tiny_tokenizer())
    ours = VanillaDecoder(target).generate(PROMPT, 40, Sampling()).token_ids
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)
    assert list(ours) == theirs[0, len(PROMPT) :].tolist()


@KERNELS
def test_logits_of_the_last_position_and_none(compiled: bool) -> None:
    target = Target(tiny_llama(), tiny_tokenizer(), compiled=compiled)
    ids, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
    every = target.forward(ids, positions, target.new_cache(16))
    last = target.forward(ids, positions, target.new_cache(16), logits="last")
    none = target.forward(ids, positions, target.new_cache(16), logits="none")
    assert every.logits is not None
    assert last.logits is not None
    assert last.logits.shape == (1, 1, 320)
    torch.testing.assert_close(last.logits, every.logits[:, -1:])
    assert none.logits is None
    assert torch.equal(target.logits(none.final), every.logits)


def test_rows_of_different_lengths_are_bitwise_the_rows_alone() -> None:
    target = Target(tiny_llama(), tiny_tokenizer())
    cache = target.new_cache(32, batch=3)
    lengths = [2, 9, 5]
    for row, length in enumerate(lengths):
        view = cache.rows(row, row + 1)
        target.forward(torch.tensor([PROMPT[:length]]), torch.arange(length)[None], view)
        cache.lengths[row : row + 1] = view.lengths
    positions = torch.tensor([[length, length + 1] for length in lengths])
    together = target.forward(torch.tensor([[7, 8]] * 3), positions, cache)
    assert together.logits is not None
    for row, length in enumerate(lengths):
        logits, captured, final = forward(target, [*PROMPT[:length], 7, 8], [length, 2])
        assert torch.equal(together.logits[row], logits[-2:])
        assert torch.equal(together.captured[row], captured[-2:])
        assert torch.equal(together.final[row], final[-2:])


@KERNELS
def test_tree_mask_gives_each_node_its_own_context(compiled: bool) -> None:
    """Two continuations of one prompt side by side equal each of them alone."""
    target = Target(tiny_llama(), tiny_tokenizer(), compiled=compiled)
    cache = target.new_cache(32)
    target.forward(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], cache)
    # Nodes: 20, its children 21 and 22, and 23 below 22.
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    positions = torch.tensor([[11, 12, 12, 13]])
    tree = target.forward(torch.tensor([[20, 21, 22, 23]]), positions, cache, mask)
    assert tree.logits is not None
    for path, nodes in (([20, 21], [0, 1]), ([20, 22, 23], [0, 2, 3])):
        logits, captured, _ = forward(target, PROMPT + path, [len(PROMPT), len(path)])
        torch.testing.assert_close(tree.logits[0, nodes], logits[-len(path) :], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tree.captured[0, nodes], captured[-len(path) :], rtol=1e-4, atol=1e-4)


# --- dtypes ---


def test_bfloat16_weights_are_computed_with_in_float32_by_the_kernels(tmp_path: Path) -> None:
    """The result is that of the rounded weights, not that of sums in bfloat16."""
    folder = save_model(tmp_path / "model", tiny_model("qwen3"))
    target = Target.load(folder, torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert target.activation_dtype == torch.float32
    rounded = tiny_model("qwen3")
    with torch.no_grad():
        for parameter in rounded.parameters():  # not the buffers: rotary frequencies stay as they are
            parameter.copy_(parameter.to(torch.bfloat16))
    expected = reference(rounded, PROMPT, target.capture_layers)
    one = torch.tensor([[1.0]], dtype=torch.bfloat16)
    processor_multiplies_them = CompiledOps().linear(one)(torch.tensor([[1 + 2**-12]])).item() == 1.0
    allowed = 1e-2 if processor_multiplies_them else 1e-4  # such processors round what they multiply
    for mine, theirs in zip(forward(target, PROMPT), expected, strict=True):
        assert (mine - theirs).norm() < allowed * theirs.norm()


def test_bfloat16_without_kernels_agrees_as_far_as_bfloat16_goes(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_model("llama"))
    target = Target.load(folder, torch.bfloat16, compiled=False)
    assert target.activation_dtype == torch.bfloat16
    logits, _, _ = forward(target, PROMPT)
    exact, _, _ = reference(tiny_model("llama").double(), PROMPT, target.capture_layers)
    theirs, _, _ = reference(tiny_model("llama").to(torch.bfloat16), PROMPT, target.capture_layers)
    own_error = (logits.double() - exact).norm() / exact.norm()
    their_error = (theirs.double() - exact).norm() / exact.norm()
    assert own_error < 1.5 * their_error


# --- folders ---


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one file", "shards"])
def test_stored_models_load_as_they_were(tmp_path: Path, tied: bool, shard: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    folder = save_model(tmp_path / "model", model, max_shard_size=shard)
    assert (
        len(list(folder.glob("*.safetensors"))) == 1
        if shard == "5GB"
        else (folder / "model.safetensors.index.json").exists()
    )
    target = Target.load(folder)
    torch.testing.assert_close(
        forward(target, PROMPT)[0], reference(model, PROMPT, (2,))[0], rtol=2e-4, atol=2e-4
    )
    assert torch.equal(target.embed_weight, target.lm_head_weight) == tied


def test_facts_of_a_target(tiny_target: Target) -> None:
    assert (tiny_target.num_layers, tiny_target.hidden_size, tiny_target.vocab_size) == (8, 32, 320)
    assert tiny_target.capture_layers == (2, 4, 5)
    assert tiny_target.eos_token_ids == {2}


def test_layers_are_copied_by_the_first_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training reads embedding, head and norm: fused copies would be half of the weights once more."""
    made: list[InferenceLayer] = []

    class Counted(InferenceLayer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **named)

    monkeypatch.setattr(target_module, "InferenceLayer", Counted)
    target = Target(tiny_llama(), tiny_tokenizer())
    assert not made
    forward(target, PROMPT)
    forward(target, PROMPT)
    assert len(made) == target.num_layers


def test_every_way_to_name_an_eos_counts() -> None:
    """Chat models end a turn with a token that only the generation config or the tokenizer may name."""
    model, tokenizer = tiny_llama(eos_token_id=[2, 7]), tiny_tokenizer()
    model.generation_config.eos_token_id = [9, 2]
    tokenizer.eos_token = "<|im_start|>"
    assert Target(model, tokenizer).eos_token_ids == {2, 7, 9, 1}


# --- refusals ---


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json there; prepare the target first"):
        Target.load(tmp_path)


def test_another_family_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
    with pytest.raises(ValueError, match="'gpt2': supported families are llama, qwen2, qwen3, mistral"):
        Target(model, tiny_tokenizer())


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        Target(tiny_model("llama", hidden_act="gelu"), tiny_tokenizer())


def test_a_rope_that_changes_with_the_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        Target(tiny_model("llama", rope_parameters=rope), tiny_tokenizer())
    Target(tiny_model("llama", rope_parameters=LLAMA3_ROPE), tiny_tokenizer())


def test_a_context_beyond_the_positions_is_refused(tiny_target: Target) -> None:
    tiny_target.new_cache(512)
    with pytest.raises(ValueError, match=r"513 tokens .* max_position_embeddings 512; shorten"):
        tiny_target.new_cache(513)


def test_a_context_beyond_the_sliding_window_is_refused() -> None:
    """Within the window nothing slides; beyond it the outputs would differ from the model's."""
    target = Target(tiny_model("mistral", sliding_window=64), tiny_tokenizer())
    target.new_cache(64)
    with pytest.raises(ValueError, match=r"65 tokens .* sliding window of 64"):
        target.new_cache(65)
    Target(tiny_model("mistral", sliding_window=None), tiny_tokenizer()).new_cache(65)


def test_a_sliding_window_that_is_switched_off_does_not_limit() -> None:
    """Qwen configurations name a window that they do not use."""
    model = tiny_model("qwen2")
    assert not model.config.use_sliding_window
    model.config.sliding_window = 64
    Target(model, tiny_tokenizer()).new_cache(65)


@pytest.mark.parametrize("layers", range(1, 7))
def test_default_capture_layers_of_shallow_targets_collide_with_a_remedy(layers: int) -> None:
    """hs[2], hs[n//2] and hs[n-3] are the same state for 4 to 6 layers; two of three would pass unnoticed."""
    with pytest.raises(ValueError, match=r"target\.capture_layers.* name them, for example") as refused:
        default_capture_layers(layers)
    example = str(refused.value).rpartition("capture_layers: ")[2]
    suggested = [int(layer) for layer in example.strip("[]").split(", ")]
    assert check_capture_layers(suggested, layers) == tuple(suggested)
    with pytest.raises(ValueError, match=r"target\.capture_layers"):
        Target(tiny_llama(layers=layers), tiny_tokenizer())
    assert Target(tiny_llama(layers=layers), tiny_tokenizer(), suggested).capture_layers == tuple(suggested)


def test_default_capture_layers() -> None:
    assert default_capture_layers(30) == (2, 15, 27)
    assert default_capture_layers(32) == (2, 16, 29)
    assert default_capture_layers(7) == (2, 3, 4)


@pytest.mark.parametrize("layers", [(), (2, 2, 5), (5, 4, 2), (-1, 4), (2, 9)])
def test_captured_layers_that_do_not_exist_or_repeat_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"target\.capture_layers: .* must be different, ascending"):
        Target(tiny_llama(), tiny_tokenizer(), layers)
