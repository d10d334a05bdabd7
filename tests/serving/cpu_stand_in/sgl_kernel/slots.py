"""Bookkeeping of token-pool slots around a speculative round; every function fills the tensor it is given."""

import ctypes

import numpy as np
import torch


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request: accept_tokens holds `accept_stride` a request."""
    count = accept_lens.numel()
    last = torch.arange(count) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:count].copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The slots of the accepted nodes; -1 fills accept_index where fewer were accepted."""
    accepted = accept_index.reshape(-1).long()
    accepted = accepted[accepted >= 0]
    accept_out_cache_loc.view(-1)[: accepted.numel()].copy_(out_cache_loc[accepted])


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """The slots of each request's tokens start..end, one request after the other."""
    slots = torch.cat(_spans(req_pool_indices, req_to_token, start_offset, end_offset))
    out_cache_loc.view(-1)[: slots.numel()].copy_(slots)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The slots behind each request that its topk branches of num_steps draft tokens may use."""
    slots = torch.cat(_spans(req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps))
    out_cache_loc.view(-1)[: slots.numel()].copy_(slots)


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """The reverse: the slots given become those of each request's tokens start..end."""
    taken = 0
    for span in _spans(req_pool_indices, req_to_token, start_offset, end_offset):
        span.copy_(out_cache_loc[taken : taken + span.numel()])
        taken += span.numel()


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A row of slots for each branch of each request: the request's own, then the branch's draft tokens."""
    rows = torch.zeros(seq_lens.numel() * topk, int(seq_lens.max()) + num_steps, dtype=req_to_token.dtype)
    for index, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[request]
        for branch in range(topk):
            row, first = rows[index * topk + branch], length + branch * num_steps
            row[:length] = slots[:length]
            row[length : length + num_steps] = slots[first : first + num_steps]
    return rows


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move cache rows in every layer's buffer, given by address and bytes a row."""
    target, source = tgt_loc.long().numpy(), src_loc.long().numpy()
    if not target.size:
        return
    rows = int(max(target.max(), source.max())) + 1
    for pointer, stride in zip(data_ptrs.view(torch.int64).tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(pointer)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        buffer[target] = buffer[source]  # the right side is copied first, so that overlaps are safe


def rotate_input_ids_cpu(*arguments, **options):
    raise NotImplementedError("drafts of several layers are not in the CPU stand-in")


def _spans(req_pool_indices, req_to_token, start, end):
    bounds = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    return [req_to_token[request, first:last] for request, first, last in bounds]
