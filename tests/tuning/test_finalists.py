"""The held-out measurement decides: who takes part, who wins, and whether that is more than noise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from eagle3.decoding.tree import TreeShape
from eagle3.measure.summary import paired_speedup
from eagle3.tuning.best import read_best, winner_flags, write_best
from eagle3.tuning.finalists import Finalist, choose_finalists, decide, fastest_default
from eagle3.tuning.space import Configuration, Space
from tests.tuning.fakes import measurement

SPACE = Space(("eagle3",), 8, 10, 64, ("bfloat16",), (0,))
TUNED = Configuration("eagle3", 2, 1, 3, "bfloat16", 0)
CHAIN = Configuration("eagle3", 3, 1, 4, "bfloat16", 0)
FINALISTS = [Finalist("2/1/3", TUNED, True), Finalist("3/1/4 (chain)", CHAIN, False)]
MARKS: dict[str, Any] = {"machine": {"cpu": "A"}, "target": "t", "drafts": {"eagle3": "d"}}


def result(name: str, speedup: float, failures: int = 0) -> dict[str, Any]:
    bounds = {"speedup_low": speedup - 0.05, "speedup_high": speedup + 0.05}
    values = {"tau": 1.5, "tokens_per_second": 30.0, "prompts": 10, "lossless": {"failures": failures}}
    return {"method": name, "speedup": speedup, **bounds, **values}


def table(tuned: list[float], chain: list[float]) -> pd.DataFrame:
    """Seconds of ten decoded tokens by prompt."""
    return pd.DataFrame(
        [
            {
                "method": name,
                "task": "quiz",
                "prompt_id": str(index),
                "tokens": 11,
                "decode_seconds": value,
            }
            for name, seconds in (("2/1/3", tuned), ("3/1/4 (chain)", chain))
            for index, value in enumerate(seconds)
        ]
    )


def test_best_trials_meet_all_defaults_once() -> None:
    other = Configuration("eagle3", 4, 1, 5, "bfloat16", 0)
    ranking = [(CHAIN, measurement([2.0])), (TUNED, measurement([1.9])), (other, measurement([1.8]))]
    found = choose_finalists(ranking, {"chain": CHAIN, "eagle3 of params.yaml": CHAIN}, SPACE, 1)
    assert [(item.name, item.tuned) for item in found] == [
        ("3/1/4 (chain, eagle3 of params.yaml)", False),
        ("2/1/3", True),
    ]


def test_the_fastest_default_of_the_trials_stands_for_all() -> None:
    other = Configuration("eagle3", 4, 1, 5, "bfloat16", 0)
    defaults = {"chain": CHAIN, "four": other, "eagle3 of params.yaml": CHAIN}
    ranking = [(TUNED, measurement([2.0])), (CHAIN, measurement([1.9])), (other, measurement([1.8]))]
    assert fastest_default(ranking, defaults) == {"chain": CHAIN, "eagle3 of params.yaml": CHAIN}
    assert fastest_default(ranking[:1], {"four": other, "chain": CHAIN}) == {"four": other}


def test_clear_winner_beats_the_default() -> None:
    seconds = [1.0 + 0.1 * index for index in range(10)]
    per_prompt = table(seconds, [value * 1.2 + 0.01 * (index % 3) for index, value in enumerate(seconds)])
    outcome = decide(FINALISTS, [result("2/1/3", 1.6), result("3/1/4 (chain)", 1.4)], per_prompt, 0)
    assert outcome.winner == FINALISTS[0]
    assert outcome.beats_default
    assert "2/1/3 beats the best default, 3/1/4 (chain)" in outcome.summary
    assert [row["name"] for row in outcome.rows] == ["2/1/3", "3/1/4 (chain)"]


def test_within_noise_says_so() -> None:
    seconds = [1.0 + 0.1 * index for index in range(10)]
    per_prompt = table(seconds, [value * (1.1 if index % 2 else 0.92) for index, value in enumerate(seconds)])
    outcome = decide(FINALISTS, [result("2/1/3", 1.41), result("3/1/4 (chain)", 1.4)], per_prompt, 0)
    assert outcome.winner == FINALISTS[0]
    assert not outcome.beats_default
    assert "Nothing beats the best default, 3/1/4 (chain), beyond noise" in outcome.summary


def test_default_can_win() -> None:
    outcome = decide(FINALISTS, [result("2/1/3", 1.3), result("3/1/4 (chain)", 1.4)], table([1.0], [1.0]), 0)
    assert outcome.winner == FINALISTS[1]
    assert "Nothing beats the defaults" in outcome.summary
    assert outcome.over_default is None


def test_what_changes_tokens_cannot_win() -> None:
    outcome = decide(
        FINALISTS, [result("2/1/3", 1.9, failures=1), result("3/1/4 (chain)", 1.4)], table([1.0], [1.0]), 0
    )
    assert outcome.winner == FINALISTS[1]
    nobody = decide(
        FINALISTS, [result("2/1/3", 1.9, 1), result("3/1/4 (chain)", 1.4, 1)], table([1.0], [1.0]), 0
    )
    assert nobody.winner is None
    assert "no winner" in nobody.summary


def test_winner_slower_than_vanilla_is_named_as_such() -> None:
    outcome = decide(FINALISTS, [result("2/1/3", 0.8), result("3/1/4 (chain)", 0.9)], table([1.0], [1.0]), 0)
    assert "do not draft on this machine" in outcome.summary


def test_paired_speedup_sums_turns_of_a_prompt() -> None:
    frame = pd.concat([table([1.0, 2.0], [2.0, 3.0]), table([1.0, 2.0], [2.0, 3.0])])
    assert paired_speedup(frame, "3/1/4 (chain)", "2/1/3", 0).estimate == pytest.approx(10 / 6)


def test_best_parameters_are_read_back_for_the_same_machine_and_draft_only(tmp_path: Path) -> None:
    path = tmp_path / "best_params.yaml"
    seconds = [1.0 + 0.1 * index for index in range(10)]
    outcome = decide(
        FINALISTS,
        [result("2/1/3", 1.6), result("3/1/4 (chain)", 1.4)],
        table(seconds, [value * 1.2 for value in seconds]),
        0,
    )
    write_best(path, outcome, "native", "--flags", MARKS, "python experiments/sweep.py")
    best = read_best(path, MARKS)
    assert (best.configuration, best.tuned) == (TUNED, True)
    TreeShape(**best.configuration.tree)
    with pytest.raises(ValueError, match=r"another machine\.cpu: run python experiments/sweep\.py again"):
        read_best(path, {**MARKS, "machine": {"cpu": "B"}})
    with pytest.raises(ValueError, match=r"drafts\.eagle3"):
        read_best(path, {**MARKS, "drafts": {"eagle3": "other"}})
    path.write_text("name: x\n")
    with pytest.raises(ValueError, match="not a sweep's result"):
        read_best(path, MARKS)
    with pytest.raises(ValueError, match=r"run python experiments/sweep\.py first"):
        read_best(tmp_path / "none.yaml", MARKS)


def test_flags_compile_a_server_that_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.tuning.best.speculation_of", lambda folder, **tree: (folder.name, tree))
    monkeypatch.setattr(
        "eagle3.tuning.best.speculative_flags", lambda engine, speculation: f"--{engine} {speculation[0]}"
    )
    compiled = replace(TUNED, backend="compile")
    assert winner_flags(TUNED, "sglang") == "--sglang eagle3"
    assert winner_flags(compiled, "sglang") == "--sglang eagle3 --enable-torch-compile"
    assert winner_flags(compiled, "native") == "--sglang eagle3"  # there the draft alone was
    assert winner_flags(compiled, "vllm") == "--vllm eagle3"  # it compiles by itself


def test_confidence_is_noted_beside_the_flags_that_cannot_say_it(tmp_path: Path) -> None:
    path = tmp_path / "best_params.yaml"
    for confidence, note in (
        (0.0, None),
        (0.2, "SGLang drafts every tree whole: confidence 0.2"),
    ):
        tuned = Finalist("2/1/3", replace(TUNED, confidence=confidence), True)
        outcome = decide([tuned], [result("2/1/3", 1.6)], table([1.0], [1.0]), 0)
        write_best(path, outcome, "native", "--flags", MARKS, "python experiments/sweep.py")
        found = yaml.safe_load(path.read_text()).get("sglang_note")
        assert found is None if note is None else found.startswith(note)
