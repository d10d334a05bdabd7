"""Decontamination protects the evaluation from prompts it was trained on; deduplication protects
validation.
"""

import random
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.decontaminate import Contamination, Match, duplicates, normalise, word_ngrams

ARTICLE = " ".join(f"word{i}" for i in range(40))


def test_normalising_ignores_case_punctuation_and_unicode_variants() -> None:
    assert normalise("  What's the ﬁrst,\nTIME? ") == "what s the first time"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("我是学生。", "我 是 学 生"),
        ("Python 3で学ぶ", "python 3 で 学 ぶ"),
        ("ภาษาไทยที่ดี", "ภ า ษ า ไ ท ย ที่ ดี"),
        ("မြန်မာ", "မြ န် မာ"),
        ("हिन्दी भाषा", "हिन्दी भाषा"),
        ("1\ufe0f\u20e3 first cafe\u0301", "1 first café"),
    ],
)
def test_words_of_scripts_without_spaces_and_with_vowel_signs(text: str, words: str) -> None:
    assert normalise(text) == words


@given(st.text(alphabet=st.characters(max_codepoint=0xFF)))
def test_words_of_western_text_are_runs_of_letters_and_digits(text: str) -> None:
    assert normalise(text) == " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def test_text_without_spaces_between_words_is_compared_like_any_other() -> None:
    question = "请用三句话解释为什么天空在白天是蓝色的而在傍晚却变成了红色"
    assert Contamination({"qa": [question]}).find(["你好," + question + "谢谢"]) == Match("qa", "ngram")
    texts = [question, question.replace("傍晚", "今晚"), "完全不同的问题"]
    assert duplicates(texts) == {1: (0, "near")}


def test_exact_match_after_normalising() -> None:
    contamination = Contamination({"qa": ["Who wrote Hamlet?"], "other": ["Who wrote Hamlet"]})
    assert contamination.find(["who wrote HAMLET"]) == Match("qa", "exact")
    assert contamination.find(["Who wrote Hamlet and why?"]) is None


def test_shared_13_gram_in_any_turn_is_found_and_12_words_are_not() -> None:
    contamination = Contamination({"news": [ARTICLE]})
    words = ARTICLE.split()
    assert contamination.find(["hello", "see: " + " ".join(words[5:18])]) == Match("news", "ngram")
    assert contamination.find(["see: " + " ".join(words[5:17]) + " something else entirely"]) is None


def test_near_duplicate_is_dropped_and_the_first_kept() -> None:
    changed = ARTICLE.replace("word20", "other")
    texts = [
        "unrelated prompt about bees",
        ARTICLE,
        ARTICLE.upper() + "!",
        changed,
        " ".join(reversed(ARTICLE.split())),
    ]
    assert duplicates(texts) == {2: (1, "exact"), 3: (1, "near")}


def test_short_and_wordless_texts_are_compared_as_they_stand() -> None:
    assert duplicates(["hi", "hello", "Hi!", "???", "!!!", "???"]) == {2: (0, "exact"), 5: (3, "exact")}


def test_minhash_finds_what_comparing_all_pairs_finds() -> None:
    generator = random.Random(0)
    vocabulary = [f"w{i}" for i in range(60)]
    texts: list[str] = []
    for _ in range(40):
        words = generator.choices(vocabulary, k=30)
        texts.append(" ".join(words))
        for edits in (1, 6):  # similarity about 0.82, and far below the threshold
            copy = list(words)
            for at in generator.sample(range(5, 25), edits):
                copy[at] = "changed"
            texts.append(" ".join(copy))
    found = set(duplicates(texts, threshold=0.7))
    shingles = [word_ngrams(text, 3) for text in texts]
    expected: set[int] = set()
    for index, own in enumerate(shingles):
        kept = [i for i in range(index) if i not in expected]
        if any(len(own & shingles[i]) / len(own | shingles[i]) >= 0.7 for i in kept):
            expected.add(index)
    assert len(expected) >= 35
    assert found <= expected
    assert len(expected - found) <= 1  # a band misses a similarity of 0.8 once in 5,000


@given(st.lists(st.text(alphabet="ab c", max_size=8), max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_has_no_exact_duplicates_and_twins_are_kept_texts(texts: list[str]) -> None:
    repeats = duplicates(texts)
    kept = [i for i in range(len(texts)) if i not in repeats]
    keys = [normalise(texts[i]) or texts[i] for i in kept]
    assert len(set(keys)) == len(keys)
    assert all(twin in kept and twin < index for index, (twin, _) in repeats.items())


def test_hash_functions_order_shingles_differently() -> None:
    # 64 hash functions that are monotone in each other would be one, and near duplicates would be missed.
    from eagle3.data.decontaminate import _minhash

    same = np.mean([_minhash({f"a{i}", f"b{i}", f"c{i}"}) == _minhash({f"a{i}"}) for i in range(50)])
    assert 0.2 < same < 0.46  # one of three shingles is the smallest for a third of the functions
