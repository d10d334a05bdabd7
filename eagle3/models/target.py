"""The target: any Llama-like causal LM of transformers, with a cached forward that captures hidden states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3.decoding.cache import KVCache
from eagle3.kernels import select_ops
from eagle3.models.layers import InferenceLayer, Rotary, linear_of, norm_of

MANIFEST = "target.json"  # of a prepared target
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of the target gives. hs[k] is transformers' hidden_states[k]."""

    logits: Tensor | None  # [B, T, V], the last position only as [B, 1, V], or None
    captured: Tensor  # [B, T, n * H]: hs[k] of the captured layers, side by side
    final: Tensor  # [B, T, H]: after the final norm, the input of lm_head


def published_capture_layers(num_layers: int) -> tuple[int, int, int]:
    """hs[2], hs[n // 2], hs[n - 3], as EAGLE-3 captures them (arXiv 2503.01840 and its released code)."""
    return (2, num_layers // 2, num_layers - 3)


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """The published layers.

    Raises:
        ValueError: where these collide (shallow targets).
    """
    layers = published_capture_layers(num_layers)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"target.capture_layers: the default hs[2], hs[n//2], hs[n-3] gives {list(layers)} for "
            f"{num_layers} layers, which are not three different layers in order; name them, for example "
            f"capture_layers: {sorted({1, num_layers // 2, num_layers - 1})}"
        )
    return layers


def check_capture_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers as a tuple; ValueError unless they are different, ascending and within 0 .. num_layers."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers:
        raise ValueError(
            f"target.capture_layers: {list(layers)} must be different, ascending and between 0 (embeddings) "
            f"and {num_layers} (the output of the last layer)"
        )
    return tuple(layers)


class Target:
    """A causal LM prepared for decoding.

    The weights, tokenizer and chat template come from transformers; the forward is this project's own, over a
    preallocated cache, because verification needs tree attention, captured layers and, on a CPU, kernels
    whose result for a token does not depend on the tokens computed beside it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        capture_layers: Sequence[int] | None = None,
        compiled: bool = True,
        held: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            held: the dtype that the weights of linear layers are kept in, the model's if None (`Ops.linear`).
        """
        config = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"target of type {config.model_type!r}: supported families are {', '.join(FAMILIES)}"
            )
        if config.hidden_act != "silu":
            raise ValueError(f"target with hidden_act {config.hidden_act!r}: only 'silu' is supported")
        self.config, self.tokenizer, self.model = config, tokenizer, model
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.capture_layers = (
            default_capture_layers(self.num_layers)
            if capture_layers is None
            else check_capture_layers(capture_layers, self.num_layers)
        )
        self.dtype, self.device = model.dtype, model.device
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // self._heads
        self._window = _sliding_window(config)

        ops = select_ops(self.device, compiled)
        self._ops, self._held = ops, held
        self.kernels = ops.name
        body = model.model
        self.embed_weight: Tensor = body.embed_tokens.weight.detach()  # [V, H]
        self.lm_head_weight: Tensor = model.lm_head.weight.detach()  # [V, H]
        self.activation_dtype = ops.activation_dtype(self.dtype)
        eps = float(config.rms_norm_eps)
        self._rotary = Rotary(body.rotary_emb, self.device)
        self._final_norm = norm_of(ops, body.norm, eps)
        self._lm_head = linear_of(ops, model.lm_head, held)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        capture_layers: Sequence[int] | None = None,
        compiled: bool = True,
        held: torch.dtype | None = None,
    ) -> Target:
        """Load a prepared target (a folder with config.json, safetensors and tokenizer).

        Args:
            capture_layers: None takes those that the folder was prepared with (target.json), and else the
                published ones.
            held: as in the constructor.

        Raises:
            ValueError: if the folder holds no model, or a family that is not supported.
        """
        if not (Path(folder) / "config.json").exists():
            raise ValueError(
                f"{folder}: no config.json there; prepare the target first: python experiments/target.py"
            )
        manifest = Path(folder) / MANIFEST
        if capture_layers is None and manifest.exists():
            capture_layers = json.loads(manifest.read_text(encoding="utf-8"))["capture_layers"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder), capture_layers, compiled, held)

    @cached_property
    def _layers(self) -> list[InferenceLayer]:
        # Made by the first forward: they copy weights, and a training reads embedding, head and norm alone.
        return [
            InferenceLayer(
                layer.self_attn,
                layer.mlp,
                layer.post_attention_layernorm,
                self._ops,
                self._heads,
                self._head_dim,
                float(self.config.rms_norm_eps),
                attention_norm=layer.input_layernorm,
                held=self._held,
            )
            for layer in self.model.model.layers
        ]

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """A cache for `batch` rows of up to `capacity` tokens.

        Raises:
            ValueError: beyond the target's sliding window or its longest position.
        """
        longest = self.config.max_position_embeddings
        if capacity > longest:
            raise ValueError(
                f"a context of {capacity} tokens is asked of a target with max_position_embeddings "
                f"{longest}; shorten the prompt or max_new_tokens"
            )
        if self._window is not None and capacity > self._window:
            raise ValueError(
                f"a context of {capacity} tokens is asked of a target with a sliding window of "
                f"{self._window}, which is supported up to the window's length only; shorten the prompt or "
                "max_new_tokens"
            )
        return KVCache(
            self.num_layers,
            batch,
            self._kv_heads,
            capacity,
            self._head_dim,
            self.activation_dtype,
            self.device,
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        logits: str = "all",
    ) -> TargetOutput:
        """Run T new tokens of each row over the cache and append them to it.

        Args:
            input_ids: [B, T].
            positions: rotary positions, [B, T].
            cache: every new token sees all slots in use of its row; the new ones go behind them.
            mask: bool [T, T] or [B, T, T], new token i sees new token j; None is causal.
            logits: "all", "last" or "none".
        """
        x = self.embed_weight[input_ids].to(self.activation_dtype)  # [B, T, H]
        rotary = self._rotary.tables(positions, cache.capacity, self.activation_dtype)
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in self.capture_layers:
                states[index] = x
            x = layer.feed_forward(layer.attend(x, x, rotary, cache, index, mask))
        cache.advance(input_ids.shape[1])
        final = self._final_norm(x)
        states[self.num_layers] = final  # transformers' last hidden state is the normed one
        captured = torch.cat([states[index] for index in self.capture_layers], dim=-1)
        if logits == "none":
            return TargetOutput(None, captured, final)
        return TargetOutput(self.logits(final if logits == "all" else final[:, -1:]), captured, final)

    def logits(self, final: Tensor) -> Tensor:
        """lm_head over final hidden states: [..., H] -> [..., V]."""
        return self._lm_head(final)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


def _sliding_window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)
