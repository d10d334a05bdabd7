"""The EAGLE-3 draft (arXiv 2503.01840, released code) with EAGLE-3.1's options (arXiv 2605.09992)."""

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
from eagle3.models.layers import InferenceLayer, linear_of, norm_of
from eagle3.models.target import Target, TargetOutput


class Eagle3Layer(nn.Module):
    """One decoder layer whose attention reads the embedding beside the hidden state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, 2 * config.hidden_size)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Module(nn.Module):
    """The trained weights, named as in the checkpoint format that SGLang and vLLM read."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(config.num_captured * width, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(width, config.rms_norm_eps) for _ in range(config.num_captured)
            )
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def set_vocabulary(self, draft_to_target: Tensor) -> None:
        """Store the draft vocabulary as the format has it: d2t holds offsets, target id = i + d2t[i]."""
        assert draft_to_target.shape == self.d2t.shape
        self.d2t.copy_(draft_to_target - torch.arange(len(draft_to_target)))
        self.t2d.zero_()
        self.t2d[draft_to_target] = True

    @property
    def draft_to_target(self) -> Tensor:
        """Target token id of each draft token, [Vd]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def reads(self, captured: Tensor, final: Tensor) -> Tensor:
        """Of the target's states, those that `fc` reads: [..., n * H] or, not fused, [..., H]."""
        return captured if self.config.fused else final

    def fc_inputs(self, captured: Tensor) -> Tensor:
        """The captured states as `fc` reads them, [..., n * H]: normalised with `fc_norm` (EAGLE-3.1)."""
        if not self.config.fc_norm:
            return captured
        parts = captured.split(self.config.hidden_size, dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)

    def fuse(self, captured: Tensor) -> Tensor:
        """[..., n * H] captured hidden states -> g [..., H]."""
        return self.fc(self.fc_inputs(captured))

    def feed_back(self, hidden: Tensor) -> Tensor:
        """What the next step reads of a layer output: itself, or its norm with `norm_output` (EAGLE-3.1)."""
        return self.norm(hidden) if self.config.norm_output else hidden


class Eagle3Draft(InferenceDraft):
    """An EAGLE-3 draft prepared for decoding with one target (see models.draft.Draft).

    Args:
        module: the trained weights.
        target: supplies the frozen embedding.
        weights: the dtype that the weights of linear layers are held in; bfloat16 halves and int8 quarters
            what a draft step reads. Drafts only propose, so this changes speed and acceptance, never the
            output.
    """

    family = "eagle3"

    def __init__(
        self, module: Eagle3Module, target: Target, weights: torch.dtype | None = None, compiled: bool = True
    ) -> None:
        config = module.config
        super().__init__(config, target, weights, compiled)
        ops = self._ops
        module = module.to(target.device, self.activation_dtype)
        self.draft_to_target = module.draft_to_target
        eps = config.rms_norm_eps
        layer = module.midlayer
        self._fc = linear_of(ops, module.fc, self._held)
        self._fc_norms = [norm_of(ops, norm, eps) for norm in module.fc_norm] if config.fc_norm else None
        self._layer = InferenceLayer(
            layer.self_attn,
            layer.mlp,
            layer.post_attention_layernorm,
            ops,
            config.num_attention_heads,
            config.head_dim,
            eps,
            held=self._held,
        )
        self._input_norm = norm_of(ops, layer.input_layernorm, eps)
        self._hidden_norm = norm_of(ops, layer.hidden_norm, eps)
        self._norm = norm_of(ops, module.norm, eps)
        self._lm_head = linear_of(ops, module.lm_head, self._held)

    def fuse(self, output: TargetOutput) -> Tensor:
        captured = output.captured if self.config.fused else output.final
        if self._fc_norms is not None:
            parts = captured.split(self.hidden_size, dim=-1)
            captured = torch.cat(
                [norm(part) for norm, part in zip(self._fc_norms, parts, strict=True)], dim=-1
            )
        return self._fc(captured)

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
        normed = self._hidden_norm(hidden)
        inputs = torch.cat((self._input_norm(embedded), normed), dim=-1)  # [B, T, 2 H]
        rotary = self._rotary.tables(positions, cache.capacity, self.activation_dtype)
        residual = normed if self.config.norm_before_residual else hidden
        x = self._layer.feed_forward(self._layer.attend(inputs, residual, rotary, cache, 0, mask))
        cache.advance(token_ids.shape[1])
        output = self._norm(x)
        fed_back = output if self.config.norm_output else x
        if logits == "none":
            return DraftOutput(fed_back, None)
        return DraftOutput(fed_back, self._lm_head(output if logits == "all" else output[:, -1:]))
