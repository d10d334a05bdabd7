"""What the EAGLE family of drafts has in common: configuration, interface and modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.decoding.cache import KVCache
from eagle3.kernels import Ops, select_ops
from eagle3.models.layers import Rotary
from eagle3.models.target import Target, TargetOutput


@dataclass(frozen=True)
class DraftConfig:
    """The shape of a draft. `hidden_size` is the target's: the target's embedding is used as it is."""

    family: str  # "eagle3" or "eagle"
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    num_captured: int  # hidden states of the target that `fc` reads (EAGLE-3)
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False  # speculators: the normed hidden state goes around the attention
    fused: bool = True  # EAGLE-3 only: false, `fc` reads the final state instead of the captured ones

    @classmethod
    def for_target(
        cls,
        target: Target,
        family: str,
        draft_vocab_size: int | None = None,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        fc_norm: bool = False,
        norm_output: bool = False,
        fused: bool = True,
    ) -> DraftConfig:
        """A draft of the target's own proportions, unless said otherwise."""
        config = target.config
        return cls(
            family=family,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=num_key_value_heads or config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=intermediate_size or config.intermediate_size,
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab_size or config.vocab_size,
            num_captured=len(target.capture_layers) if fused else 1,
            rms_norm_eps=float(config.rms_norm_eps),
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
            fc_norm=fc_norm,
            norm_output=norm_output,
            fused=fused,
        )

    def rotary(self) -> LlamaRotaryEmbedding:
        """The rotary embedding of the draft's attention (the target's own)."""
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=self.hidden_size,
                num_attention_heads=self.num_attention_heads,
                head_dim=self.head_dim,
                rope_parameters=self.rope_parameters,
                max_position_embeddings=self.max_position_embeddings,
            )
        )


def check_start_layers(key: str, layers: Sequence[int], count: int) -> None:
    """Refuse layers that an independent draft cannot start from; `key` names them in the error.

    Raises:
        ValueError: unless they are different, ascending and of the target's `count` layers.
    """
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= count:
        raise ValueError(
            f"{key}: {list(layers)} must be different layers of the target in ascending order, from 0 to "
            f"{count - 1}, for example [0, {count - 1}]"
        )


def check_draft_settings(
    name: str, draft: Any, vocabulary_size: int, vocab_size: int, heads: int, layers: int
) -> None:
    """Refuse a draft that cannot be built for a target, before hours of regeneration.

    Args:
        draft: one of drafts in params.yaml, with whichever keys its family has.
        vocabulary_size: vocabulary.size of params.yaml.
        vocab_size, heads, layers: the target's.

    Raises:
        ValueError: naming key, value and remedy.
    """
    kv_heads = getattr(draft, "num_key_value_heads", None)
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"drafts.{name}.num_key_value_heads: {kv_heads} does not divide the target's {heads} heads; "
            "choose a divisor, or null for the target's own number"
        )
    if hasattr(draft, "layers"):
        check_start_layers(f"drafts.{name}.layers", draft.layers, layers)
    if vocabulary_size > vocab_size:
        raise ValueError(
            f"vocabulary.size: {vocabulary_size} is more than the target's {vocab_size} tokens; lower it"
        )


@dataclass(frozen=True)
class DraftOutput:
    """One forward of a draft."""

    hidden: Tensor  # [B, T, H]: what the next draft step takes as `hidden`
    logits: Tensor | None  # [B, T, Vd], the last position only as [B, 1, Vd], or None


class Draft(Protocol):
    """A draft prepared for decoding with one target.

    Pairing: `token_ids[t]` is the token that follows the position whose hidden state is `hidden[t]`. Worked:
    the prompt is x0..x4, the target gives the states h0..h4 and the token x5. The draft reads x1..x5 beside
    h0..h4 at positions 0..4; its output at index 4 predicts x6.
    """

    family: str
    hidden_size: int
    draft_to_target: Tensor  # [Vd] int64: target token of each draft token

    def fuse(self, output: TargetOutput) -> Tensor:
        """The hidden states that the draft reads, [B, T, H], from a forward of the target."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        logits: str = "all",
    ) -> DraftOutput:
        """Run T new tokens of each row over the draft's cache; `mask` and `logits` as in Target.forward."""
        ...

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """The draft's own cache, of one layer."""
        ...


class RMSNorm(nn.Module):
    """RMS normalisation over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    """The projections of the draft's attention, reading inputs of width `input_size`."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        super().__init__()
        queries, keys = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def check_fits(config: DraftConfig, target: Target) -> None:
    """Refuse a draft that was made for another target, saying what differs.

    Raises:
        ValueError: on another hidden size, vocabulary or number of captured layers.
    """
    pairs = _sizes(config.hidden_size, config.vocab_size, target)
    if config.family == "eagle3" and config.fused:
        pairs.append(("number of captured layers", config.num_captured, len(target.capture_layers)))
    _refuse_differences(pairs)


def check_sizes(hidden_size: int, vocab_size: int, layers: int | None, target: Target) -> None:
    """As `check_fits`, with what the JSON files alone tell: a wrong pair is refused before weights are read.

    Args:
        layers: of the target that the draft was trained for; None where that is not known.
    """
    pairs = _sizes(hidden_size, vocab_size, target)
    if layers is not None:
        pairs.append(("number of target layers", layers, target.num_layers))
    _refuse_differences(pairs)


def _sizes(hidden_size: int, vocab_size: int, target: Target) -> list[tuple[str, int, int]]:
    return [
        ("hidden size", hidden_size, target.hidden_size),
        ("vocabulary size", vocab_size, target.vocab_size),
    ]


def _refuse_differences(pairs: Sequence[tuple[str, int, int]]) -> None:
    different = [f"{name} {mine} (target: {theirs})" for name, mine, theirs in pairs if mine != theirs]
    if different:
        raise ValueError(
            f"this draft does not belong to this target: it has {', '.join(different)}; train a draft for "
            "the target, or name the target that the draft was trained for"
        )


def check_weights(ops: Ops, weights: torch.dtype | None, target: Target) -> None:
    """Refuse draft weights of another dtype than the target's where the kernels do not mix dtypes.

    Raises:
        ValueError: for plain torch (a GPU, or a CPU without a compiler) and differing dtypes.
    """
    if ops.name == "torch" and weights not in (None, target.dtype):
        raise ValueError(
            f"evaluate.draft_dtype: {weights} beside a target in {target.dtype} needs the compiled CPU "
            "kernels; set draft_dtype to the target's dtype"
        )


class InferenceDraft:
    """What drafts prepared for decoding share: checks against the target, kernels, rotary tables, cache."""

    def __init__(
        self, config: DraftConfig, target: Target, weights: torch.dtype | None, compiled: bool
    ) -> None:
        check_fits(config, target)
        self.config = config
        self.hidden_size = config.hidden_size
        self._target = target
        self._ops = select_ops(target.device, compiled)
        check_weights(self._ops, weights, target)
        self.activation_dtype = self._ops.activation_dtype(target.dtype)
        self._held = weights or target.dtype  # see Ops.linear
        self._rotary = Rotary(config.rotary().to(target.device), target.device)

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """See `Draft.new_cache`."""
        config = self.config
        return KVCache(
            1,
            batch,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
            self.activation_dtype,
            self._target.device,
        )

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """The target's embedding of tokens, [B, T] -> [B, T, H]."""
        return self._target.embed_weight[token_ids].to(self.activation_dtype)
