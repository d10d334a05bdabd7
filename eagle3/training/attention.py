"""Attention of training-time test (arXiv 2503.01840, §3.2): context causally, own steps on the diagonal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, "rotate half" convention: x [B, heads, T, D]; cos, sin [T, D] or [B, 1, T, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def test_time_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], chosen: Tensor | None
) -> Tensor:
    """Attention of draft step i = len(keys) - 1.

    Worked, three steps, position t = 5: the query of step 2 sees the keys of step 0 (made from the target's
    states) at positions 0..5, the key of step 1 at index 5 and its own key of step 2 at index 5. Indices 0..4
    of steps 1 and 2 belong to drafts that started elsewhere, and are not seen. In decoding those are the
    committed context and the chain itself.

    Args:
        query: [B, Hq, K, D], rotated by t + i.
        keys: one a step, rotated by t + their step: of step 0 [B, Hkv, T, D], of later ones [B, Hkv, K, D].
        values: as keys.
        chosen: [B, K], the positions t that steps after the first are made at; None: all, K = T.

    Returns:
        [B, Hq, K, D]
    """
    group = query.shape[1] // keys[0].shape[1]
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, enable_gqa=group > 1)
    keys = [key.repeat_interleave(group, dim=1) for key in keys]
    values = [value.repeat_interleave(group, dim=1) for value in values]
    query = query * query.shape[-1] ** -0.5
    length = keys[0].shape[2]
    slots = torch.arange(length, device=query.device)
    rows = slots[None] if chosen is None else chosen
    hidden = slots > rows[:, None, :, None]  # [B or 1, 1, K, T]
    context = (query @ keys[0].transpose(-1, -2)).masked_fill(hidden, float("-inf"))  # [B, Hq, K, T]
    own = torch.stack([torch.linalg.vecdot(query, key) for key in keys[1:]], dim=-1)  # [B, Hq, K, i]
    weights = torch.cat((context, own), dim=-1).softmax(-1)
    result = weights[..., :length] @ values[0]
    for step, value in enumerate(values[1:]):
        result = result + weights[..., length + step, None] * value
    return result
