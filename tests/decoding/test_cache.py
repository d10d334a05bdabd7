"""The KV cache holds what was appended, whatever truncations and compactions came before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.decoding.cache import KVCache, ReusableCache

LAYERS, HEADS, DIM = 2, 2, 3


def new_cache(batch: int, capacity: int) -> KVCache:
    return KVCache(LAYERS, batch, HEADS, capacity, DIM, torch.float32, "cpu")


def append_all(cache: KVCache, first: int, count: int) -> Tensor:
    """Append `count` recognisable tokens to every row; returns their keys, [B, Hkv, T, D]."""
    k = torch.arange(first, first + count).float()[None, None, :, None].expand(cache.batch, HEADS, count, DIM)
    k = k + 1000 * torch.arange(cache.batch)[:, None, None, None]
    for layer in range(LAYERS):
        keys, values = cache.append(layer, k + 0.25 * layer, -(k + 0.25 * layer))
        assert keys.shape == values.shape == (cache.batch, HEADS, cache.max_length + count, DIM)
    cache.advance(count)
    return k


def content(cache: KVCache, row: int, layer: int) -> list[float]:
    keys = cache.keys[layer, row, :, : cache.lengths[row]]
    values = cache.values[layer, row, :, : cache.lengths[row]]
    assert torch.equal(keys, -values), "keys and values must move together"
    assert torch.equal(keys, keys[:1, :, :1].expand_as(keys)), "heads must move together"
    return keys[0, :, 0].tolist()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_cache_behaves_like_a_list_per_row(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    cache, expected = new_cache(batch, 64), [list[float]() for _ in range(batch)]
    counter = 0
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 6))
        append_all(cache, counter, count)
        for row in range(batch):
            expected[row] += [1000 * row + token for token in range(counter, counter + count)]
        counter += count
        row = data.draw(st.integers(0, batch - 1))
        length = cache.lengths[row]
        start = data.draw(st.integers(0, length))
        slots = sorted(data.draw(st.sets(st.integers(start, length - 1)))) if start < length else []
        cache.compact(start, slots, row)
        expected[row] = expected[row][:start] + [expected[row][slot] for slot in slots]
        if data.draw(st.booleans()):
            keep = [data.draw(st.integers(0, length)) for length in cache.lengths]
            cache.truncate(keep)
            expected = [tokens[:length] for tokens, length in zip(expected, keep, strict=True)]
        for row in range(batch):
            for layer in range(LAYERS):
                assert content(cache, row, layer) == [token + 0.25 * layer for token in expected[row]]


def test_rows_are_views_and_can_be_copied() -> None:
    cache = new_cache(4, 16)
    append_all(cache, 0, 4)
    cache.truncate([1, 2, 3, 4])
    cache.copy_row(3, 0)
    assert cache.lengths == [4, 2, 3, 4]
    assert content(cache, 0, 1) == [3000.25, 3001.25, 3002.25, 3003.25]
    view = cache.rows(1, 3)
    assert view.lengths == [2, 3]
    append_all(view, 8, 2)
    assert cache.lengths == [4, 2, 3, 4], "the caller brings the lengths back"
    cache.lengths[1:3] = view.lengths
    assert content(cache, 1, 0) == [1000, 1001, 8, 9]
    assert content(cache, 2, 0) == [2000, 2001, 2002, 1008, 1009]
    assert content(cache, 3, 0) == [3000, 3001, 3002, 3003]


def test_capacity_is_checked_and_named() -> None:
    cache = new_cache(1, 4)
    append_all(cache, 0, 3)
    with pytest.raises(ValueError, match=r"5 slots needed .*, 4 available"):
        cache.append(0, torch.zeros(1, HEADS, 2, DIM), torch.zeros(1, HEADS, 2, DIM))


def test_compaction_in_place_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(1, 8)
    append_all(cache, 0, 6)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("copied slots that were in place")

    monkeypatch.setattr(torch, "tensor", refuse)
    cache.compact(2, [2, 3])
    assert cache.lengths == [4]


def test_unused_slots_are_finite() -> None:
    # A masked score times a NaN value would still be NaN.
    cache = new_cache(2, 8)
    assert torch.isfinite(cache.keys).all()
    assert torch.isfinite(cache.values).all()


def test_reusable_cache_is_empty_again_and_grows() -> None:
    made: list[int] = []

    def make(capacity: int) -> KVCache:
        made.append(capacity)
        return new_cache(1, capacity)

    holder = ReusableCache(make, context=1000)
    first = holder.reserve(100)
    append_all(first, 0, 5)
    assert holder.reserve(200) is first
    assert first.lengths == [0]
    assert holder.reserve(300).capacity >= 300
    assert holder.reserve(1000).capacity == 1000
    assert len(made) == 3
