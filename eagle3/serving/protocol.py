"""The two protocols: what a request for token ids looks like, and where an answer ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.decoding.sampling import Sampling

SGLANG_PATH, OPENAI_PATH = "/generate", "/v1/completions"


def names_model(told: str, folder: Path) -> bool:
    """Whether what a server calls its model can be the one in a folder.

    It can by the folder's name, and for a prepared target by the source that its target.json keeps.
    """
    names = {folder.name}
    prepared = folder / "target.json"
    if prepared.is_file():
        source = str(json.loads(prepared.read_text(encoding="utf-8"))["source"])
        names.add(Path(source.partition(":")[2] or source).name)
    return Path(told).name.casefold() in {name.casefold() for name in names}


def sglang_body(ids: Sequence[int], max_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """A request to SGLang's own interface, which takes and gives token ids."""
    return {
        "input_ids": list(ids),
        "sampling_params": {
            "max_new_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "sampling_seed": sampling.seed,
        },
    }


def with_end_token(tokens: Sequence[int], finish_reason: Mapping[str, Any]) -> list[int]:
    """SGLang's tokens of an answer that ended, the end token included also where the server leaves it out.

    Args:
        finish_reason: of its meta_info; "matched" is the end token, or a text where a stop text ended it.
    """
    matched = finish_reason.get("matched")
    ended_by = [matched] if isinstance(matched, int) and list(tokens[-1:]) != [matched] else []
    return [*tokens, *ended_by]


def openai_body(model: str, ids: Sequence[int], max_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """A request to OpenAI's completions as vLLM extends them: token ids in and out."""
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "return_token_ids": True,
        # Else the model's generation_config would bend the distribution.
        "repetition_penalty": 1.0,
        "min_p": 0.0,
    }
