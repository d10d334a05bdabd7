"""The preallocated key/value cache shared by the target and the drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, allocated once, with a length for each row.

    A model appends the keys and values of its new tokens layer by layer (`append`) and then moves the
    lengths (`advance`). A speculative decoder afterwards gives back the slots of rejected tokens
    (`truncate`) or moves the accepted ones together (`compact`).

    Rows of equal length, batch size 1 above all, are written and read through slices; rows of different
    lengths take index operations. Slots at or beyond a row's length hold zeros or stale values: finite, so
    that a masked attention over them adds exactly nothing.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate `capacity` slots for each of `batch` rows.

        Raises:
            ValueError: if `batch` or `capacity` is below 1.
        """
        if batch < 1 or capacity < 1:
            raise ValueError(f"a KV cache needs batch and capacity of at least 1, got {batch} and {capacity}")
        # One tensor, so that moving slots is one operation over keys, values and layers.
        self._storage = torch.zeros(  # [2, L, B, Hkv, capacity, D]
            2, layers, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device
        )
        self.keys = self._storage[0]  # [L, B, Hkv, capacity, D]
        self.values = self._storage[1]  # [L, B, Hkv, capacity, D]
        self._layer_keys = list(self.keys.unbind(0))
        self._layer_values = list(self.values.unbind(0))
        self.batch = batch
        self.capacity = capacity
        self.lengths: list[int] = [0] * batch
        self._slots: tuple[tuple[int, ...], int, Tensor] | None = None

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same length (always so for batch size 1)."""
        return self.batch == 1 or len(set(self.lengths)) == 1

    @property
    def max_length(self) -> int:
        """The length of the longest row, in slots."""
        return self.lengths[0] if self.batch == 1 else max(self.lengths)

    def require(self, count: int) -> None:
        """Check that `count` more slots are free in every row.

        Raises:
            ValueError: if a row would exceed the capacity.
        """
        longest = self.max_length
        if longest + count > self.capacity:
            raise ValueError(
                f"KV cache: {longest + count} slots needed ({longest} used + {count} new), {self.capacity} "
                "available; allocate a larger capacity (prompt + max_new_tokens + draft tokens)"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values of one layer behind each row's length.

        Args:
            layer: which layer.
            k: keys, [B, Hkv, T, D].
            v: values, [B, Hkv, T, D].

        Returns:
            Views of keys and values, [B, Hkv, max_length + T, D]. In row b, slots from lengths[b] + T on do
            not belong to the row and have to be masked.

        Raises:
            ValueError: if a row would exceed the capacity.
        """
        count = k.shape[2]
        self.require(count)
        longest = self.max_length
        end = longest + count
        keys, values = self._layer_keys[layer], self._layer_values[layer]
        if self.uniform:
            keys.narrow(2, longest, count).copy_(k)
            values.narrow(2, longest, count).copy_(v)
        else:
            rows, slots = self._row_slots(count)
            keys[rows, :, slots] = k.transpose(1, 2).to(keys.dtype)  # [B, T, Hkv, D]
            values[rows, :, slots] = v.transpose(1, 2).to(values.dtype)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, count: int) -> None:
        """Count `count` appended slots in every row; called once after the last layer."""
        assert self.max_length + count <= self.capacity
        self.lengths = [length + count for length in self.lengths]

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Shorten all rows to one length, or each row to its own. Nothing is copied."""
        wanted = [lengths] * self.batch if isinstance(lengths, int) else list(lengths)
        assert len(wanted) == self.batch
        assert all(0 <= new <= old for new, old in zip(wanted, self.lengths, strict=True))
        self.lengths = wanted

    def compact(self, start: int, slots: Sequence[int], row: int = 0) -> None:
        """Keep, from slot `start` of `row` on, only `slots` (absolute, increasing) and move them to `start`.

        Worked: length 14, start 10, slots [10, 12, 13]: slot 10 stays, 12 moves to 11, 13 to 12; length 13.
        The leading part that already lies in place is not copied.
        """
        count = len(slots)
        assert all(start + i <= slot < self.lengths[row] for i, slot in enumerate(slots))
        in_place = 0
        while in_place < count and slots[in_place] == start + in_place:
            in_place += 1
        if in_place < count:
            rows = self._storage[:, :, row]  # [2, L, Hkv, capacity, D]
            moving = torch.tensor(slots[in_place:], device=rows.device)
            target = rows.narrow(3, start + in_place, count - in_place)
            target.copy_(rows.index_select(3, moving))
        self.lengths[row] = start + count

    def rows(self, start: int, stop: int) -> KVCache:
        """Rows start .. stop - 1 as a cache over the same memory, with lengths of its own.

        The caller brings the lengths back (`self.lengths[start:stop] = view.lengths`) when it has appended.
        """
        assert 0 <= start < stop <= self.batch
        view = copy.copy(self)
        view._storage = self._storage[:, :, start:stop]
        view.keys, view.values = view._storage[0], view._storage[1]
        view._layer_keys, view._layer_values = list(view.keys.unbind(0)), list(view.values.unbind(0))
        view.batch = stop - start
        view.lengths = self.lengths[start:stop]
        view._slots = None
        return view

    def copy_row(self, source: int, destination: int) -> None:
        """Overwrite one row with another, its length included."""
        used = self.lengths[source]
        self._storage[:, :, destination, :, :used].copy_(self._storage[:, :, source, :, :used])
        self.lengths[destination] = used

    def _row_slots(self, count: int) -> tuple[Tensor, Tensor]:
        """Row and slot indices of `count` new tokens, [B, 1] and [B, T]; built once a forward."""
        key = tuple(self.lengths)
        device = self._storage.device
        if self._slots is None or self._slots[0] != key or self._slots[1] != count:
            first = torch.tensor(self.lengths, device=device)
            self._slots = (key, count, first[:, None] + torch.arange(count, device=device))
        return torch.arange(self.batch, device=device)[:, None], self._slots[2]


class ReusableCache:
    """One cache kept from request to request, so that memory is touched once; grows when needed."""

    STEP = 256

    def __init__(self, new_cache: Callable[[int], KVCache], context: int) -> None:
        """
        Args:
            new_cache: makes a cache of a given capacity.
            context: the largest capacity that makes sense (the model's positions).
        """
        self._new_cache = new_cache
        self._context = context
        self._cache: KVCache | None = None

    def reserve(self, slots: int) -> KVCache:
        """An empty cache of at least `slots` slots."""
        if self._cache is None or self._cache.capacity < slots:
            rounded = -(-slots // self.STEP) * self.STEP
            self._cache = None  # give the memory back first
            self._cache = self._new_cache(max(slots, min(rounded, self._context)))
        self._cache.truncate(0)
        return self._cache
