"""Duplicates inside the training prompts, and evaluation tasks that leaked into them.

Both run before anything is split: a prompt that is in the training set and, slightly changed, in a
validation set flatters every number measured there.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Thai and Lao, Myanmar, Khmer, Hiragana, Katakana and Han have no spaces between words: each of their
# characters counts as a word. A part of a character class.
_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Vowel signs and accents that belong to the letter before them; to Python they are no letters. Without the
# variation selectors, which only say how the character before them is drawn.
_MARKS = "".join(
    chr(code)
    for code in range(0x10000)
    if unicodedata.category(chr(code)) in ("Mn", "Mc") and not 0xFE00 <= code <= 0xFE0F
)
_WORD = re.compile(rf"[^\W{_SPACELESS}]+(?:[{_MARKS}]+[^\W{_SPACELESS}]*)*|(?=\w)[{_SPACELESS}][{_MARKS}]*")
_HASHES = 64
_ROWS_PER_BAND = 4
_PRIME = 4294967291  # the largest below 2^32


def normalise(text: str) -> str:
    """Words in lower case with single spaces: no punctuation, no case, no Unicode variants (NFKC).

    In scripts without spaces between words each character is one.
    """
    return " ".join(_words(text))


def word_ngrams(text: str, size: int) -> set[str]:
    """All runs of `size` normalised words; empty for a shorter text."""
    words = _words(text)
    return {" ".join(words[i : i + size]) for i in range(len(words) - size + 1)}


@dataclass(frozen=True)
class Match:
    """The evaluation task a training prompt is in, and how: "exact" or "ngram"."""

    task: str
    how: str


class Contamination:
    """Recognises texts that share an exact prompt or a word n-gram with evaluation prompts.

    13-grams are the size used since GPT-3 (arXiv 2005.14165, appendix C): long enough that task wording alone
    ("complete the code I provided") does not match.
    """

    def __init__(self, evaluation_texts: Mapping[str, Iterable[str]], ngram: int = 13) -> None:
        """`evaluation_texts` by task; a text that several tasks hold counts for the first."""
        assert ngram >= 1
        self.ngram = ngram
        self._exact: dict[str, str] = {}
        self._ngrams: dict[str, str] = {}
        for task, texts in evaluation_texts.items():
            for text in texts:
                self._exact.setdefault(normalise(text), task)
                for gram in word_ngrams(text, ngram):
                    self._ngrams.setdefault(gram, task)

    def find(self, turns: Sequence[str]) -> Match | None:
        """The evaluation task that one of the turns is in, or None."""
        for turn in turns:
            task = self._exact.get(normalise(turn))
            if task is not None:
                return Match(task, "exact")
            grams = word_ngrams(turn, self.ngram) & self._ngrams.keys()
            if grams:
                return Match(self._ngrams[min(grams)], "ngram")
        return None


def duplicates(texts: Sequence[str], threshold: float = 0.7, shingle: int = 3) -> dict[int, tuple[int, str]]:
    """Index of every text that repeats an earlier kept one -> (index of that one, "exact" | "near").

    "near" is a Jaccard similarity of word shingles of at least `threshold`. Candidates come from MinHash
    bands (64 hashes, 16 bands of 4 rows: similarity 0.7 is missed once in 80, and 0.8 once in 5,000), and
    every candidate is verified exactly, so that nothing below the threshold is dropped. Deterministic; the
    first text wins.
    """
    assert 0 < threshold <= 1
    seen: dict[str, int] = {}
    bands: dict[tuple[int, bytes], list[int]] = {}
    kept_shingles: dict[int, set[str]] = {}
    result: dict[int, tuple[int, str]] = {}
    for index, text in enumerate(texts):
        key = normalise(text) or text  # a text without any word is compared as it stands
        if key in seen:
            result[index] = (seen[key], "exact")
            continue
        shingles = word_ngrams(text, shingle) or {key}
        keys = _band_keys(shingles)
        candidates = sorted({other for band in keys for other in bands.get(band, ())})
        twin = next((c for c in candidates if _jaccard(shingles, kept_shingles[c]) >= threshold), None)
        if twin is not None:
            result[index] = (twin, "near")
            # Remembered so that an exact copy of a near duplicate is called a duplicate of the kept text.
            seen[key] = twin
            continue
        seen[key] = index
        kept_shingles[index] = shingles
        for band in keys:
            bands.setdefault(band, []).append(index)
    return result


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _jaccard(a: set[str], b: set[str]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common)


def _band_keys(shingles: set[str]) -> list[tuple[int, bytes]]:
    signature = _minhash(shingles)
    starts = range(0, _HASHES, _ROWS_PER_BAND)
    return [(start, signature[start : start + _ROWS_PER_BAND].tobytes()) for start in starts]


def _minhash(shingles: set[str]) -> NDArray[np.uint64]:
    """Smallest value of each of 64 hash functions over the shingles. [64]"""
    digests = (hashlib.blake2b(s.encode(), digest_size=4).digest() for s in shingles)
    base = np.array([int.from_bytes(d, "little") for d in digests], dtype=np.uint64)
    # a·x + b stays below 2^63 for a, b < 2^31 and 32-bit x, so nothing wraps before the modulus.
    mixed = _MULTIPLIERS[:, None] * base[None, :] + _OFFSETS[:, None]
    return np.asarray((mixed % np.uint64(_PRIME)).min(axis=1))


def _hash_parameters() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    generator = np.random.Generator(np.random.PCG64(0))
    return (
        generator.integers(1, 1 << 31, _HASHES, dtype=np.uint64),
        generator.integers(0, 1 << 31, _HASHES, dtype=np.uint64),
    )


_MULTIPLIERS, _OFFSETS = _hash_parameters()
