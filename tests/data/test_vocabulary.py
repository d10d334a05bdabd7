"""The draft vocabulary protects acceptance: a wrong map between draft and target tokens gives no error,
only bad drafts.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3.data.vocabulary import (
    MANIFEST,
    TENSORS,
    DraftVocabulary,
    build_vocabulary,
    check_mapping,
    count_tokens,
    hash_tokenizer,
    load_vocabulary,
    save_vocabulary,
)
from tests.data.tiny_tokenizer import CHATML, chatml_tokenizer


def build(counts: list[int], size: int, eos: tuple[int, ...] = (0,)) -> DraftVocabulary:
    return build_vocabulary(np.array(counts, dtype=np.int64), size, eos, "tokenizer", "data")


def test_most_frequent_tokens_with_ties_to_the_smaller_id() -> None:
    vocabulary = build([0, 5, 9, 5, 5, 1], size=3)
    assert vocabulary.target_ids == (0, 1, 2)  # EOS 0, then 9 times, then the first of the three with 5
    assert vocabulary.coverage == pytest.approx(14 / 25)


def test_offsets_follow_the_checkpoint_contract() -> None:
    vocabulary = build([1, 0, 7, 0, 0, 7], size=3)
    assert vocabulary.target_ids == (0, 2, 5)
    assert vocabulary.d2t().tolist() == [0, 1, 3]  # target id = i + d2t[i]
    assert vocabulary.d2t().dtype == torch.int64
    assert vocabulary.t2d().tolist() == [True, False, True, False, False, True]
    assert vocabulary.t2d().dtype == torch.bool


def test_fewer_distinct_tokens_than_the_size_are_padded_with_the_smallest_ids() -> None:
    vocabulary = build([0, 0, 0, 0, 3, 0], size=4, eos=(5,))
    assert vocabulary.target_ids == (0, 1, 4, 5)
    assert (vocabulary.distinct, vocabulary.coverage) == (1, 1.0)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=30).filter(any), st.data())
@settings(max_examples=100, deadline=None)
def test_any_counts_give_the_size_the_eos_and_the_best_coverage(
    counts: list[int], data: st.DataObject
) -> None:
    eos = data.draw(st.sets(st.integers(0, len(counts) - 1), min_size=1, max_size=2))
    size = data.draw(st.integers(len(eos), len(counts)))
    vocabulary = build(counts, size, tuple(eos))
    ids = vocabulary.target_ids
    assert len(ids) == size == len(set(ids))
    assert list(ids) == sorted(ids)
    assert eos <= set(ids)
    best = sum(counts[i] for i in eos) + sum(
        sorted((c for i, c in enumerate(counts) if i not in eos), reverse=True)[: size - len(eos)]
    )
    assert vocabulary.coverage == pytest.approx(best / sum(counts))
    assert check_mapping(vocabulary.d2t(), vocabulary.t2d(), len(counts), "x") == ids


def test_counting_ignores_the_order_of_rows_and_refuses_foreign_tokens() -> None:
    rows = [[1, 2, 2], [], [3]]
    assert count_tokens(rows, 5).tolist() == count_tokens(rows[::-1], 5).tolist() == [0, 1, 2, 1, 0]
    with pytest.raises(ValueError, match="token ids 1 to 5 do not fit"):
        count_tokens([[1, 5]], 5)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"vocabulary.size is {size}: give at least 2"):
        build([1] * 6, size, eos=(0, 1))


def test_nothing_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="no supervised tokens"):
        build([0, 0], 1)


def test_saved_and_loaded_vocabulary_is_equal(tmp_path: Path) -> None:
    vocabulary = build([1, 0, 7, 0, 0, 7], size=3)
    save_vocabulary(vocabulary, tmp_path)
    assert load_vocabulary(tmp_path, "tokenizer", "data") == vocabulary
    first = (tmp_path / TENSORS).read_bytes(), (tmp_path / MANIFEST).read_bytes()
    save_vocabulary(vocabulary, tmp_path)
    assert ((tmp_path / TENSORS).read_bytes(), (tmp_path / MANIFEST).read_bytes()) == first


@pytest.mark.parametrize(
    ("tokenizer", "data", "key"), [("x", "data", "tokenizer_hash"), ("tokenizer", "x", "data_hash")]
)
def test_vocabulary_of_another_tokenizer_or_other_data_is_refused(
    tokenizer: str, data: str, key: str, tmp_path: Path
) -> None:
    save_vocabulary(build([1, 2, 3], size=2), tmp_path)
    with pytest.raises(ValueError, match=f"{key} is .*run the vocabulary stage again"):
        load_vocabulary(tmp_path, tokenizer, data)


def test_mapping_and_manifest_of_two_vocabularies_are_refused(tmp_path: Path) -> None:
    save_vocabulary(build([1, 0, 7, 0, 0, 7], size=3), tmp_path)
    manifest = (tmp_path / MANIFEST).read_bytes()
    save_vocabulary(build([1, 7, 0, 0, 0, 7], size=3), tmp_path)
    (tmp_path / MANIFEST).write_bytes(manifest)
    with pytest.raises(ValueError, match="is not the one that"):
        load_vocabulary(tmp_path)


def test_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no draft vocabulary here"):
        load_vocabulary(tmp_path)


def test_all_zero_mapping_of_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    save_vocabulary(build([1, 0, 7, 0, 0, 7], size=3), tmp_path)
    for t2d in (torch.zeros(6, dtype=torch.bool), build([1, 0, 7, 0, 0, 7], size=3).t2d()):
        save_file({"d2t": torch.zeros(3, dtype=torch.int64), "t2d": t2d}, tmp_path / TENSORS)
        with pytest.raises(ValueError, match="d2t is all zero for a reduced vocabulary of 3 out of 6"):
            load_vocabulary(tmp_path)


def test_zero_offsets_are_right_where_they_are_meant() -> None:
    full, first = build([1, 2, 3], size=3), build([3, 2, 0], size=2)
    for vocabulary in (full, first):
        assert not vocabulary.d2t().any()
        ids = check_mapping(vocabulary.d2t(), vocabulary.t2d(), 3, "x")
        assert ids == vocabulary.target_ids


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([0, 2, 5], [1, 0, 1, 0, 0, 1], "absolute ids"),  # absolute: 0, 3, 7
        ([0, 1, 0], [1, 0, 1, 0, 0, 0], "one twice"),
        ([0, 1, 3], [1, 0, 1, 0, 1, 0], "t2d does not mark"),
        ([0, 1, 3], [1, 0, 1], "do not fit"),
    ],
)
def test_damaged_mappings_are_refused(d2t: list[int], t2d: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_mapping(torch.tensor(d2t), torch.tensor(t2d, dtype=torch.bool), 6, "x")


def test_wrong_types_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 and bool"):
        check_mapping(torch.zeros(3), torch.zeros(6, dtype=torch.bool), 6, "x")


def test_tokenizer_hash_follows_the_tokens_and_not_the_template() -> None:
    one, other = chatml_tokenizer(), chatml_tokenizer(CHATML + " ")
    assert hash_tokenizer(one) == hash_tokenizer(other)
    other.add_tokens(["<new>"])
    assert hash_tokenizer(one) != hash_tokenizer(other)


def test_manifest_reports_coverage_and_padding(tmp_path: Path) -> None:
    save_vocabulary(build([0, 0, 0, 0, 3, 0], size=4), tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert (manifest["coverage"], manifest["distinct"], manifest["padding"]) == (1.0, 1, 3)
