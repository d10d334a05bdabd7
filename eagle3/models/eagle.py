"""The EAGLE draft (arXiv 2401.15077); with a dynamic tree it is EAGLE-2's (arXiv 2406.16858)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle3.decoding.cache import KVCache
from eagle3.models.draft import (
    DraftAttention,
    DraftConfig,
    DraftMLP,
    DraftOutput,
    InferenceDraft,
    RMSNorm,
)
from eagle3.models.layers import InferenceLayer, linear_of
from eagle3.models.target import Target, TargetOutput


class EagleLayer(nn.Module):
    """A decoder layer without input norm: its input is the output of `fc`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.mlp = DraftMLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleModule(nn.Module):
    """The trained weights, named as in the released EAGLE checkpoints. The LM head is the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=True)
        self.layers = nn.ModuleList([EagleLayer(config)])


class EagleDraft(InferenceDraft):
    """An EAGLE draft prepared for decoding with one target (see models.draft.Draft).

    Reads the target's top-layer feature (after the final norm, as the LM head does), predicts the next
    feature, and proposes tokens through the target's LM head over the whole vocabulary.
    """

    family = "eagle"

    def __init__(
        self, module: EagleModule, target: Target, weights: torch.dtype | None = None, compiled: bool = True
    ) -> None:
        config = module.config
        super().__init__(config, target, weights, compiled)
        ops = self._ops
        module = module.to(target.device, self.activation_dtype)
        self.draft_to_target = torch.arange(config.vocab_size, device=target.device)
        layer = module.layers[0]
        assert isinstance(layer, EagleLayer)
        # `fc` reads features of which a few dimensions are large: int8 loses their small weights.
        self._fc = linear_of(ops, module.fc, torch.bfloat16 if self._held == torch.int8 else self._held)
        self._layer = InferenceLayer(
            layer.self_attn,
            layer.mlp,
            layer.post_attention_layernorm,
            ops,
            config.num_attention_heads,
            config.head_dim,
            config.rms_norm_eps,
            held=self._held,
        )
        # A second copy of the head in the draft's dtype, as reading the target's takes longer than the layer;
        # and in plain torch, beside a target on the kernels, so that all of the draft is.
        same = self._held == target.dtype and ops.name == target.kernels
        self._lm_head = target.logits if same else ops.linear(target.lm_head_weight, held=self._held)

    def fuse(self, output: TargetOutput) -> Tensor:
        return output.final

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        logits: str = "all",
    ) -> DraftOutput:
        embedded = self._embedded(token_ids)  # [B, T, H]
        x = self._fc(torch.cat((embedded, hidden), dim=-1))
        rotary = self._rotary.tables(positions, cache.capacity, self.activation_dtype)
        x = self._layer.feed_forward(self._layer.attend(x, x, rotary, cache, 0, mask))
        cache.advance(token_ids.shape[1])
        if logits == "none":
            return DraftOutput(x, None)
        return DraftOutput(x, self._lm_head(x if logits == "all" else x[:, -1:]))
