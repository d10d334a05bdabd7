"""Attention over SGLang's token pool: the slots of a request's tokens are its row of req_to_token."""

import torch


def decode_attention_cpu(
    query, k_buffer, v_buffer, k_scale, v_scale, output, key, value, loc, attn_logits, req_to_token,
    req_pool_indices, seq_lens, sm_scale, logit_cap, is_cross_attn, sliding_window, encoder_lens, sinks,
):  # fmt: skip
    """One new token of each request over all its tokens; writes `output`, and the new key and value."""
    _refuse(sinks, encoder_lens, is_cross_attn)
    if key is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - sliding_window) if sliding_window and sliding_window > 0 else 0
        slots = req_to_token[request, first:length].long()
        output[row : row + 1] = _attend(
            query[row : row + 1], k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, None
        )


def extend_attention_cpu(
    query, key, value, output, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens,
    extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap, is_cross_attn, sliding_window,
    encoder_lens, sinks, tree_mask, is_causal=True,
):  # fmt: skip
    """The new tokens of each request over its tokens before them and, by causality or tree, each other."""
    _refuse(sinks, encoder_lens, is_cross_attn)
    for index, request in enumerate(req_pool_indices.tolist()):
        length, new, start = (int(values[index]) for values in (seq_lens, extend_seq_lens, extend_start_loc))
        if new == 0:
            continue
        before, mask = length - new, None
        if tree_mask is not None:
            tree = tree_mask.view(-1)[index * new * new : (index + 1) * new * new].view(new, new)
            mask = torch.cat([torch.ones(new, before, dtype=torch.bool), tree.bool()], 1)
        elif is_causal:
            mask = torch.ones(new, length, dtype=torch.bool).tril(before)
            if sliding_window and sliding_window > 0:
                mask &= torch.ones(new, length, dtype=torch.bool).triu(before - sliding_window + 1)
        slots = req_to_token[request, :length].long()
        output[start : start + new] = _attend(
            query[start : start + new], k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, mask
        )


def _refuse(sinks, encoder_lens, is_cross_attn):
    if sinks is not None or encoder_lens is not None or is_cross_attn:
        raise NotImplementedError("attention sinks and cross-attention are not in the CPU stand-in")


def _attend(query, keys, values, scale, logit_cap, mask):
    """[n, heads, d] over [S, kv_heads, d]; mask [n, S] or None for all."""
    if logit_cap and logit_cap > 0:
        raise NotImplementedError("capped attention logits are not in the CPU stand-in")
    q, k, v = (
        part.transpose(0, 1).unsqueeze(0) for part in (query, keys.to(query.dtype), values.to(query.dtype))
    )
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return result.squeeze(0).transpose(0, 1)
