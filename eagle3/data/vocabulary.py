"""The draft vocabulary: the tokens an EAGLE-3 draft can propose, and the maps between it and the target's.

A wrong map ruins acceptance without an error (a stale one is reused, an all-zero one is loaded), so it is
stored with the hashes of the tokenizer and of the data it was counted on, and refused where they do not
match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.provenance import replacing, write_json

TENSORS, MANIFEST = "vocabulary.safetensors", "vocabulary.json"


@dataclass(frozen=True)
class DraftVocabulary:
    """Token ids of the target in ascending order, one per draft token, with where they were counted.

    Worked: target ids (0, 2, 5) give d2t = (0, 1, 3), because 0 + 0 = 0, 1 + 1 = 2 and 2 + 3 = 5.
    """

    target_ids: tuple[int, ...]
    target_size: int
    tokenizer_hash: str
    data_hash: str
    coverage: float
    """Share of the counted tokens that the draft can propose."""
    distinct: int
    """Different tokens among those counted; fewer than the size means that the rest is padding."""

    @property
    def size(self) -> int:
        return len(self.target_ids)

    def d2t(self) -> Tensor:
        """Offsets: the target id of draft token i is i + d2t[i]. int64 [Vd]"""
        return self.draft_to_target() - torch.arange(self.size)

    def draft_to_target(self) -> Tensor:
        """Target ids themselves. int64 [Vd]"""
        return torch.tensor(self.target_ids, dtype=torch.int64)

    def t2d(self) -> Tensor:
        """True where the draft can propose the target's token. bool [V]"""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.draft_to_target()] = True
        return mask


def count_tokens(rows: Iterable[Sequence[int]], target_size: int) -> NDArray[np.int64]:
    """How often each target token occurs in the rows' supervised tokens. [V]

    Raises ValueError for a token outside the vocabulary: the rows belong to another tokenizer.
    """
    counts = np.zeros(target_size, dtype=np.int64)
    for row in rows:
        ids = np.asarray(row, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= target_size):
            raise ValueError(
                f"token ids {ids.min()} to {ids.max()} do not fit the target's vocabulary of {target_size}: "
                "the rows were made with another tokenizer; regenerate them"
            )
        counts += np.bincount(ids, minlength=target_size)
    return counts


def build_vocabulary(
    counts: NDArray[np.int64],
    size: int,
    eos_token_ids: Collection[int],
    tokenizer_hash: str,
    data_hash: str,
) -> DraftVocabulary:
    """The `size` most frequent tokens, EOS ids always among them; ties go to the smaller id.

    When fewer distinct tokens occur, the smallest unused ids fill up, so that the shape is always [size].
    Raises ValueError when the size does not fit, or nothing was counted.
    """
    target_size = len(counts)
    if not len(eos_token_ids) <= size <= target_size or size < 1:
        raise ValueError(
            f"vocabulary.size is {size}: give at least {max(1, len(eos_token_ids))} (the EOS tokens) and at "
            f"most {target_size} (the target's vocabulary)"
        )
    total = int(counts.sum())
    if total == 0:
        raise ValueError("no supervised tokens to count: regeneration produced no answers; run it again")
    outside = [token for token in eos_token_ids if not 0 <= token < target_size]
    if outside:
        raise ValueError(f"EOS ids {outside} are outside the target's vocabulary of {target_size}")
    ranked = counts.astype(np.float64)
    ranked[list(eos_token_ids)] = np.inf
    # A stable sort of the negated counts puts equal counts, zeros included, in the order of their ids.
    chosen = np.sort(np.argsort(-ranked, kind="stable")[:size])
    return DraftVocabulary(
        target_ids=tuple(int(token) for token in chosen),
        target_size=target_size,
        tokenizer_hash=tokenizer_hash,
        data_hash=data_hash,
        coverage=float(counts[chosen].sum() / total),
        distinct=int((counts > 0).sum()),
    )


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the token <-> id table, which is what the maps depend on; template and defaults do not
    enter.
    """
    table = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(table, ensure_ascii=False).encode()).hexdigest()


def save_vocabulary(vocabulary: DraftVocabulary, folder: Path) -> None:
    """Write d2t and t2d as safetensors and the manifest as JSON, each atomically; the manifest last."""
    tensors = {"d2t": vocabulary.d2t(), "t2d": vocabulary.t2d()}
    with replacing(folder / TENSORS) as temporary:
        save_file(tensors, temporary)
    write_json(
        folder / MANIFEST,
        {
            "size": vocabulary.size,
            "target_size": vocabulary.target_size,
            "tokenizer_hash": vocabulary.tokenizer_hash,
            "data_hash": vocabulary.data_hash,
            "mapping_hash": _mapping_hash(vocabulary.target_ids),
            "coverage": vocabulary.coverage,
            "distinct": vocabulary.distinct,
            "padding": max(0, vocabulary.size - vocabulary.distinct),
        },
    )


def load_vocabulary(
    folder: Path, tokenizer_hash: str | None = None, data_hash: str | None = None
) -> DraftVocabulary:
    """Read a vocabulary; refuse one that is damaged, or made for another tokenizer or other data
    (ValueError).
    """
    for name in (MANIFEST, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: there is no draft vocabulary here; run the vocabulary stage")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for key, expected in (("tokenizer_hash", tokenizer_hash), ("data_hash", data_hash)):
        if expected is not None and manifest[key] != expected:
            raise ValueError(
                f"{folder / MANIFEST}: {key} is {manifest[key][:12]}, but {expected[:12]} is in use: the "
                "draft vocabulary does not belong to this tokenizer or data; run the vocabulary stage again"
            )
    tensors = load_file(folder / TENSORS)
    target_ids = check_mapping(tensors["d2t"], tensors["t2d"], manifest["target_size"], str(folder / TENSORS))
    if _mapping_hash(target_ids) != manifest["mapping_hash"]:
        raise ValueError(
            f"{folder}: {TENSORS} is not the one that {MANIFEST} describes; run the vocabulary stage again"
        )
    return DraftVocabulary(
        target_ids=target_ids,
        target_size=manifest["target_size"],
        tokenizer_hash=manifest["tokenizer_hash"],
        data_hash=manifest["data_hash"],
        coverage=manifest["coverage"],
        distinct=manifest["distinct"],
    )


def check_mapping(d2t: Tensor, t2d: Tensor, target_size: int, where: str) -> tuple[int, ...]:
    """The target ids of a stored mapping, or ValueError saying what is wrong with it.

    d2t: int64 offsets [Vd]; t2d: bool [V]. An all-zero d2t maps draft token i to target token i. That is
    right for a full vocabulary, and for a reduced one only where t2d marks just those tokens; otherwise
    nobody filled it in, and nearly every draft would be wrong without an error.
    """
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise ValueError(f"{where}: d2t is {d2t.dtype} and t2d {t2d.dtype}; they have to be int64 and bool")
    if d2t.ndim != 1 or t2d.shape != (target_size,) or not 0 < len(d2t) <= target_size:
        raise ValueError(
            f"{where}: d2t {tuple(d2t.shape)} and t2d {tuple(t2d.shape)} do not fit a target vocabulary of "
            f"{target_size}"
        )
    if len(d2t) < target_size and not d2t.any() and not (t2d[: len(d2t)].all() and t2d.sum() == len(d2t)):
        raise ValueError(
            f"{where}: d2t is all zero for a reduced vocabulary of {len(d2t)} out of {target_size}: the "
            "mapping was never filled in; make the vocabulary, or convert the checkpoint, again"
        )
    target_ids = d2t + torch.arange(len(d2t))
    if target_ids.min() < 0 or target_ids.max() >= target_size or len(target_ids.unique()) < len(target_ids):
        raise ValueError(
            f"{where}: d2t maps to ids outside the target's {target_size} tokens or to one twice; is it made "
            "of absolute ids instead of offsets (target id = i + d2t[i])?"
        )
    mask = torch.zeros(target_size, dtype=torch.bool)
    mask[target_ids] = True
    if not torch.equal(mask, t2d):
        raise ValueError(
            f"{where}: t2d does not mark the tokens that d2t maps to: the two do not belong together"
        )
    return tuple(int(token) for token in target_ids)


def _mapping_hash(target_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(target_ids, dtype="<i8").tobytes()).hexdigest()
