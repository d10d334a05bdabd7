"""What a usable prompt looks like: one reason for each refusal, so that the manifest can count them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r"\w+")
_NO_TEXT = frozenset({"Cc", "Cs", "Co", "Cn"})  # control, surrogate, private, unassigned
# How targets begin an answer; in a user turn they mean that the target skipped the request and answered
# itself.
_ANSWER_OPENINGS = re.compile(
    r"\s*(as an ai\b|i'?m sorry,? but|i apologi[sz]e|i cannot\b|sure[,!.]|certainly[,!.]|of course[,!.]|"
    r"here (is|are) (a|an|the|some|my)\b|you'?re welcome|i'?d be (happy|glad)|i'?m (happy|glad) to|"
    r"hello! how can|how can i (help|assist)|thank you for)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PromptFilter:
    """Bounds of a usable prompt. Lengths in characters; shares between 0 and 1."""

    min_characters: int = 12
    max_characters: int = 6000
    min_latin_share: float = 0.8
    """Letters of the Latin script among all letters; 0 for targets of other scripts."""
    max_repeated_share: float = 0.3
    """Words covered by word 4-grams that occur more than twice."""
    min_readable_share: float = 0.7
    """Letters, digits and white space among all characters."""


STRICT = PromptFilter()
"""For prompts that the target sampled."""

LENIENT = PromptFilter(
    min_characters=1,
    max_characters=100_000,
    min_latin_share=0.0,
    max_repeated_share=1.0,
    min_readable_share=0.0,
)
"""For prompts that people chose: any language and form, but no control characters or special tokens."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Strings that become special tokens wherever they stand, an end of turn for example."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset({*tokenizer.all_special_tokens, *added})


def refusal(text: str, bounds: PromptFilter, forbidden: Collection[str] = ()) -> str | None:
    """Why the text is not usable as a prompt, or None. The first that applies, in a fixed order.

    `forbidden` are strings that it may not contain (see `special_tokens`).
    """
    stripped = text.strip()
    if not stripped:
        return "empty"
    if any(c == "\ufffd" or unicodedata.category(c) in _NO_TEXT for c in stripped if c not in "\n\t\r"):
        return "garbage"
    if any(token in stripped for token in forbidden):
        return "special_token"
    if len(stripped) < bounds.min_characters:
        return "too_short"
    if len(stripped) > bounds.max_characters:
        return "too_long"
    if readable_share(stripped) < bounds.min_readable_share:
        return "garbage"
    if latin_share(stripped) < bounds.min_latin_share:
        return "language"
    if repeated_share(stripped) > bounds.max_repeated_share:
        return "repetition"
    return None


def answers_instead(text: str) -> bool:
    """Whether the text opens like an assistant's answer rather than a user's request."""
    return _ANSWER_OPENINGS.match(text) is not None


def readable_share(text: str) -> float:
    """Share of characters that are letters, digits or white space."""
    return sum(c.isalnum() or c.isspace() for c in text) / len(text)


def latin_share(text: str) -> float:
    """Share of Latin letters among letters; 1.0 without any letters, which says nothing."""
    letters = [c for c in text if c.isalpha()]
    # Latin letters with their accents and extensions end at U+024F.
    return sum(c < "\u0250" for c in letters) / len(letters) if letters else 1.0


def repeated_share(text: str, size: int = 4) -> float:
    """Share of words inside word n-grams that occur more than twice: a loop of the sampler, not a refrain."""
    words = _WORD.findall(text.lower())
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    counts = Counter(grams)
    covered = {i + k for i, gram in enumerate(grams) if counts[gram] > 2 for k in range(size)}
    return len(covered) / len(words) if words else 0.0
