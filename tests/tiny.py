"""Tiny random models: the architecture of the real ones, a few thousand parameters, made in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "the quick brown fox jumps over the lazy dog and asks the assistant a question",
    "user assistant system what is the sum of two numbers and why is the sky blue",
    "write a function that returns the largest of three numbers in a list",
)


def tiny_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template; it encodes any text. Needs at least 259 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(
    vocab_size: int = 320,
    hidden_size: int = 32,
    layers: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    tied: bool = False,
    context: int = 512,
    scale: float = 0.25,
    eos_token_id: int | Sequence[int] = 2,
) -> LlamaForCausalLM:
    """A random Llama. `scale` is the weights' standard deviation: large, so that logits differ clearly."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=scale,
        bos_token_id=0,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny_target(folder: Path, seed: int = 0, **model: object) -> Path:
    """Write a tiny target (model and tokenizer) as a Hugging Face folder."""
    tiny_llama(seed=seed, **model).save_pretrained(folder)  # type: ignore[arg-type]
    tiny_tokenizer().save_pretrained(folder)
    return folder
