"""Tiny random models of every supported family, with the properties in which the families differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.tiny import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama with llama3 rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama with biases": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama of odd sizes": lambda: LlamaConfig(**SHAPE | {"intermediate_size": 37}, head_dim=12),
    "qwen2": lambda: Qwen2Config(**SHAPE),  # biases of q, k and v
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),  # q and k norms; head_dim is not hidden / heads
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None, head_dim=16),
}


def tiny_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in which every parameter matters: norms and biases are random too."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    return model


def save_model(folder: Path, model: PreTrainedModel, **options: Any) -> Path:
    """Write a model and the tiny tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder
