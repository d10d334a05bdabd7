"""Estimates pool paired times; nothing is lost on the way to the storage and back."""

import json

import pytest

from eagle3.measure.protocol import VANILLA
from eagle3.measure.records import Cell, CellKey
from eagle3.tuning.measurement import Measurement, Rounds, measurement_from_cells
from tests.tuning.fakes import measurement


def cell(method: str, prompt: str, turn: int, seconds: float, repeat: int = 0, salt: int = 0) -> Cell:
    tokens = (1, 2, 3, 4 + salt)
    return Cell(
        key=CellKey(method, "task", prompt, turn, 0.0, repeat),
        prompt_tokens=5,
        token_ids=tokens,
        finish_reason="length",
        acceptance_lengths=(2, 1) if method != VANILLA else (),
        accepted_drafts=(1, 0) if method != VANILLA else (),
        drafted_depths=(3, 3) if method != VANILLA else (),
        prefill_seconds=0.1,
        decode_seconds=seconds,
        draft_seconds=0.1,
        verify_seconds=0.2,
        accept_seconds=0.0,
        cache_seconds=0.0,
        process=1,
        foreign_cpu=0.0,
    )


def test_turns_are_summed_and_paired_by_prompt() -> None:
    cells = [cell(VANILLA, "a", 0, 4.0), cell(VANILLA, "a", 1, 2.0)]
    cells += [cell("trial", "a", 0, 2.0), cell("trial", "a", 1, 1.0)]
    found = measurement_from_cells(cells, "trial")
    assert found.speedups() == {"task/a": 2.0}
    assert found.prompts["task/a"].tokens == 6  # three decoded tokens a turn; the first is the prefill's
    assert found.tau == 1.5
    assert found.rounds.reached == (4, 2)
    assert found.rounds.accepted == (2, 0)


def test_repeats_are_medians_and_outputs_are_compared() -> None:
    cells = []
    for repeat, seconds in enumerate((1.0, 9.0, 2.0)):
        cells += [cell(VANILLA, "a", 0, 4.0, repeat), cell("trial", "a", 0, seconds, repeat, repeat)]
    found = measurement_from_cells(cells, "trial")
    assert found.speedup() == 2.0
    assert found.repeats == 3
    assert found.different_outputs == 1


def test_pooling_two_trials_equals_one_with_both_repeats() -> None:
    first, second = measurement([2.0, 1.0]), measurement([1.0, 3.0])
    pooled = first + second
    assert pooled.repeats == 2
    assert pooled.prompts["task/0"].seconds == (5.0, 10.0)
    assert Measurement() + first == first


def test_speedup_is_of_totals_and_equals_the_intervals_estimate() -> None:
    found = measurement([2.0, 1.0])
    assert found.speedup() == pytest.approx(20 / 15)  # not the mean of the ratios, 1.5
    interval = found.interval(seed=0)
    assert interval.estimate == pytest.approx(found.speedup())


def test_storage_keeps_everything() -> None:
    found = measurement([1.5, 1.25], Rounds(4, 9, 1.0, 0.25, 0.5, 0.125, 0.0, (4, 3), (3, 2)), repeats=2)
    assert Measurement.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_round_parts_add_up_to_the_round() -> None:
    found = measurement([1.0], Rounds(10, 20, 1.0, 0.2, 0.5, 0.1, 0.1))
    assert sum(found.round_ms().values()) == pytest.approx(100.0)
    assert found.round_ms()["other"] == pytest.approx(10.0)
