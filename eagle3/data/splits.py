"""Fixed splits and fair subsets, decided by a hash of the id alone.

A row keeps its split whatever is added to or removed from the data, and on every machine. Files are written
in the order of the hash, so that the first n rows of a file are a random sample of it (MT-bench is sorted
by category).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

Row = TypeVar("Row")


def position(namespace: str, row_id: str) -> float:
    """A number in [0, 1) that depends on nothing but namespace and id, evenly distributed."""
    digest = hashlib.sha256(f"{namespace}\0{row_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def choose_split(namespace: str, row_id: str, share: float, inside: str, outside: str) -> str:
    """`inside` for a `share` of all ids, `outside` for the others. Namespace: the task, or "train"."""
    return inside if position(namespace, row_id) < share else outside


def hash_order(rows: Iterable[Row], key: Callable[[Row], str], namespace: str = "order") -> list[Row]:
    """The rows in an order that is random to the eye and always the same; any prefix is a fair sample.

    The namespace differs from that of the splits, so that a prefix is not all of one split.
    """
    return sorted(rows, key=lambda row: (position(namespace, key(row)), key(row)))
