"""The protocol as a whole, on decoders whose speed and tokens are known."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eagle3.decoding.generation import Decoder
from eagle3.measure.evaluation import evaluate
from eagle3.measure.protocol import Block, arms, measure, method_order, schedule, warm_up
from eagle3.measure.records import Cell, CellKey, Failure
from eagle3.measure.rendering import Prompt
from eagle3.measure.settings import EvaluationSettings
from tests.measure.fakes import (
    VOCABULARY,
    FakeDecoder,
    continuation,
    fake_renderer,
    fake_rescore,
    prompts,
)

SETTINGS = EvaluationSettings(max_new_tokens=9, dtype="float32", repeats=3, seed=1)
RESULT_KEYS = {
    *("method", "task", "temperature", "dtype", "tree", "prompts", "tokens", "tau", "acceptance_by_depth"),
    *("tokens_per_second", "speedup", "speedup_low", "speedup_high", "end_to_end_speedup", "prefill_ms"),
    *("decode_ms_per_token", "lossless"),
}


def run(
    folder: Path,
    decoders: Sequence[Decoder],
    items: Sequence[Prompt] | None = None,
    settings: EvaluationSettings = SETTINGS,
    **changes: Any,
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "machine": {"cpu": "imaginary"},
        "subject": {"drafts": {"eagle3": "abc"}},
        "reports": folder / "reports",
        "journal": folder / "evaluation.jsonl",
        "trees": {"eagle3": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}},
        "progress": False,
        **changes,
    }
    return evaluate(decoders, items or prompts(), fake_renderer, fake_rescore, settings, **arguments)


def row_of(
    report: dict[str, Any], method: str, task: str = "all", temperature: float = 0.0
) -> dict[str, Any]:
    (row,) = [
        row
        for row in report["results"]
        if (row["method"], row["task"], row["temperature"]) == (method, task, temperature)
    ]
    return row


def check_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in report["verdict"]["checks"] if check["name"] == name)


def pair() -> list[Decoder]:
    return [FakeDecoder("vanilla"), FakeDecoder("eagle3", token_seconds=0.5, round_tokens=4)]


def test_report_of_a_method_twice_as_fast(tmp_path: Path) -> None:
    items = [*prompts(12, "chat", turns=2), *prompts(12, "code")]
    report = run(tmp_path, pair(), items)
    assert set(report) == {"machine", "settings", "verdict", "results", "pairs"}
    assert json.loads((tmp_path / "reports/evaluation.json").read_text()) == report
    assert {(row["method"], row["task"]) for row in report["results"]} == {
        (method, task) for method in ("vanilla", "vanilla-aa", "eagle3") for task in ("all", "chat", "code")
    }
    assert all(row.keys() >= RESULT_KEYS for row in report["results"])

    row = row_of(report, "eagle3")
    assert row["speedup"] == pytest.approx(2.0, rel=0.02)
    assert 1.9 < row["speedup_low"] <= row["speedup"] <= row["speedup_high"] < 2.1
    # The prefill is as slow for both: end to end gains less.
    assert 1.0 < row["end_to_end_speedup"] < row["speedup"]
    assert row["end_to_end_speedup_low"] <= row["end_to_end_speedup"] <= row["end_to_end_speedup_high"]
    assert row["prompts"] == 24
    assert row["generations"] == 36
    assert row["tree"] == {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    assert row["lossless"] == {"compared": 36, "exact": 36, "near_ties": 0, "failures": 0}
    assert row["prefill_ms"] == pytest.approx(500.0)
    assert row["tokens_per_second"] == pytest.approx(1000 / row["decode_ms_per_token"])
    assert row["round_ms"]["verify"] == pytest.approx(2.5 * row["round_ms"]["draft"], rel=0.01)
    assert sum(row["round_ms"].values()) * row["rounds"] == pytest.approx(
        row["decode_ms_per_token"] * (row["tokens"] - row["generations"]), rel=0.01
    )
    assert row_of(report, "vanilla")["tau"] == 1.0
    assert row_of(report, "vanilla")["round_ms"] is None
    assert row_of(report, "vanilla-aa")["speedup_low"] <= 1.0 <= row_of(report, "vanilla-aa")["speedup_high"]
    assert report["verdict"]["trustworthy"]


def test_two_methods_are_compared_with_each_other_in_the_same_run(tmp_path: Path) -> None:
    """Both are faster than vanilla; whether one beats the other is an interval of its own."""
    decoders = [*pair(), FakeDecoder("adaptive", token_seconds=0.4, round_tokens=4)]
    report = run(tmp_path, decoders, pairs=[("adaptive", "eagle3"), ("eagle3", "adaptive")])
    faster, slower = report["pairs"]
    assert (faster["method"], faster["over"], faster["temperature"]) == ("adaptive", "eagle3", 0.0)
    assert faster["speedup"] == pytest.approx(1.25, rel=0.02)
    assert 1.0 < faster["speedup_low"] <= faster["speedup"] <= faster["speedup_high"]
    assert slower["speedup"] == pytest.approx(1 / faster["speedup"])


def test_tokens_and_tau_come_from_token_ids_and_rounds(tmp_path: Path) -> None:
    items = prompts()
    report = run(tmp_path, pair(), items)
    answers = [continuation(fake_renderer(item, []), SETTINGS.max_new_tokens) for item in items]
    row = row_of(report, "eagle3")
    assert row["tokens"] == sum(map(len, answers))
    rounds = sum(-(-(len(answer) - 1) // 4) for answer in answers)  # 4 tokens a round, the last one shorter
    assert row["tau"] == pytest.approx(sum(len(answer) - 1 for answer in answers) / rounds)


def test_per_prompt_table_has_one_row_an_answer(tmp_path: Path) -> None:
    items = prompts(5, turns=2)
    report = run(tmp_path, pair(), items)
    frame = pd.read_parquet(tmp_path / "reports/per_prompt.parquet")
    assert len(frame) == 3 * 5 * 2
    assert not frame.duplicated(["method", "task", "prompt_id", "turn", "temperature"]).any()
    own = frame[frame.method == "eagle3"]
    assert own.tokens.sum() == row_of(report, "eagle3")["tokens"]
    assert own.decode_seconds.sum() * 1000 == pytest.approx(
        row_of(report, "eagle3")["decode_ms_per_token"] * (own.tokens - 1).sum()
    )
    assert list(own.iloc[0].token_ids) == list(
        continuation(fake_renderer(items[0], []), SETTINGS.max_new_tokens)
    )


def test_second_turn_continues_vanillas_first_answer(tmp_path: Path) -> None:
    # The method's own first answer is wrong; were it used, its second prompt would differ from vanilla's.
    wrong = FakeDecoder("eagle3", spoil=lambda tokens: ((tokens[0] + 1) % VOCABULARY, *tokens[1:]))
    vanilla = FakeDecoder("vanilla")
    run(tmp_path, [vanilla, wrong], prompts(3, turns=2))
    assert set(wrong.calls) - set(vanilla.calls) == set()


def test_at_temperature_every_method_continues_its_own_answer(tmp_path: Path) -> None:
    settings = EvaluationSettings(max_new_tokens=9, dtype="float32", temperatures=(0.0, 1.0), repeats=2)
    other = FakeDecoder("eagle3", spoil=lambda tokens: (*tokens[:-1], (tokens[-1] + 1) % VOCABULARY))
    vanilla = FakeDecoder("vanilla")
    report = run(tmp_path, [vanilla, other], prompts(3, turns=2), settings)
    assert set(other.calls) - set(vanilla.calls)
    # Sampled outputs are not compared token by token.
    assert row_of(report, "eagle3", temperature=1.0)["lossless"]["compared"] == 0
    assert row_of(report, "eagle3", temperature=0.0)["lossless"]["failures"] == 6


def test_planted_divergence_fails_and_planted_near_tie_does_not(tmp_path: Path) -> None:
    def last_token(offset: int) -> Any:
        return lambda tokens: (*tokens[:-1], (tokens[-1] + offset) % VOCABULARY)

    decoders = [
        FakeDecoder("vanilla"),
        FakeDecoder("tie", spoil=last_token(1)),
        FakeDecoder("wrong", spoil=last_token(2)),
    ]
    settings = EvaluationSettings(max_new_tokens=9, dtype="bfloat16", repeats=1)
    report = run(tmp_path, decoders, settings=settings)
    assert row_of(report, "tie")["lossless"] == {"compared": 12, "exact": 0, "near_ties": 12, "failures": 0}
    assert row_of(report, "wrong")["lossless"] == {"compared": 12, "exact": 0, "near_ties": 0, "failures": 12}
    assert not report["verdict"]["trustworthy"]
    assert check_of(report, "lossless")["level"] == "failure"
    assert "wrong 12" in check_of(report, "lossless")["sentence"]


def test_a_failure_in_one_repeat_is_seen(tmp_path: Path) -> None:
    flaky = FakeDecoder("eagle3")
    # Calls 1 and 2 warm up; 12 prompts a repeat: call 30 is in repeat 2.
    flaky.spoil = lambda tokens: tokens if len(flaky.calls) != 30 else (*tokens[:-1], (tokens[-1] + 3) % 50)
    report = run(tmp_path, [FakeDecoder("vanilla"), flaky])
    assert row_of(report, "eagle3")["lossless"]["failures"] == 1
    assert check_of(report, "repeatable")["level"] == "warning"


def test_methods_are_interleaved_by_prompt_in_random_order() -> None:
    names = ["vanilla", "vanilla-aa", "eagle", "eagle3"]
    items = prompts(40)
    blocks = schedule(items, SETTINGS)
    assert len(blocks) == 120
    assert [block.repeat for block in blocks] == [0] * 40 + [1] * 40 + [2] * 40
    assert [block.prompt for block in blocks[:40]] != [block.prompt for block in blocks[40:80]]
    orders = [tuple(method_order(names, block, 0, SETTINGS.seed)) for block in blocks]
    first = Counter(order[0] for order in orders)
    # Each of 4 methods is first in about 30 of 120 blocks.
    assert all(12 < first[name] < 50 for name in names)
    assert orders == [
        tuple(method_order(names, block, 0, SETTINGS.seed)) for block in schedule(items, SETTINGS)
    ]


def test_one_block_measures_all_methods_before_the_next_prompt() -> None:
    decoders = arms(pair())
    cells: dict[CellKey, Cell] = {}
    seen = []
    for record in measure(decoders, schedule(prompts(4), SETTINGS), fake_renderer, SETTINGS, cells):
        assert isinstance(record, Cell)
        cells[record.key] = record
        seen.append((record.key.repeat, record.key.prompt_id))
    assert all(len(set(seen[start : start + 3])) == 1 for start in range(0, len(seen), 3))


def test_warm_up_covers_every_method_and_both_ends_of_the_lengths() -> None:
    decoders = pair()
    items = prompts(5, turns=2)
    warmed = warm_up(arms(decoders), items, fake_renderer, SETTINGS)
    assert set(warmed) == {"vanilla", "eagle3"}
    for decoder in decoders:
        assert isinstance(decoder, FakeDecoder)
        lengths = [len(call) for call in decoder.calls]
        assert min(lengths) == len(fake_renderer(items[0], []))
        assert max(lengths) == len(fake_renderer(items[4], [[1] * SETTINGS.max_new_tokens]))


def test_the_aa_arm_can_be_a_decoder_of_its_own(tmp_path: Path) -> None:
    vanilla, again = FakeDecoder("vanilla"), FakeDecoder("vanilla-aa")
    report = run(tmp_path, [vanilla, FakeDecoder("eagle3", token_seconds=0.5)], again=again)
    assert len(vanilla.calls) == len(again.calls) == 2 + 36
    assert set(report["settings"]["warm_up"]) == {"vanilla", "vanilla-aa", "eagle3"}
    assert row_of(report, "vanilla-aa")["lossless"]["exact"] == 12


def test_resume_after_a_kill_neither_loses_nor_doubles_a_cell(tmp_path: Path) -> None:
    killed = FakeDecoder("eagle3", token_seconds=0.5, round_tokens=4, stop_after=2 + 17)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [FakeDecoder("vanilla"), killed])
    journal = tmp_path / "evaluation.jsonl"
    measured = sum('"kind": "cell"' in line for line in journal.read_text().splitlines())
    assert 17 <= measured < 108
    with journal.open("a") as stream:
        stream.write('{"kind": "cell", "key": {"meth')  # the kill fell into a write

    vanilla, method = pair()
    report = run(tmp_path, [vanilla, method])
    assert isinstance(vanilla, FakeDecoder)
    assert isinstance(method, FakeDecoder)
    assert len(method.calls) == 2 + 36 - 17
    assert len(vanilla.calls) + len(method.calls) == 4 + 108 - measured
    assert report["verdict"]["processes"] == 2
    assert f"resuming: {measured} generations" in report["settings"]["resumed"]
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl.finished").read_text().splitlines()]
    keys = [tuple(line["key"].values()) for line in lines if line["kind"] == "cell"]
    assert len(keys) == len(set(keys)) == 108
    # The fakes' times depend on the number of calls: only tokens compare with an unbroken run.
    whole = run(tmp_path / "unbroken", pair())
    assert row_of(report, "eagle3")["tau"] == row_of(whole, "eagle3")["tau"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"machine": {"cpu": "another"}}, "machine.cpu"),
        ({"subject": {"drafts": {"eagle3": "retrained"}}}, "subject.drafts.eagle3"),
        (
            {"settings": EvaluationSettings(max_new_tokens=8, dtype="float32", seed=1)},
            "settings.max_new_tokens",
        ),
        ({"items": prompts(11)}, "prompts"),
        ({"trees": {}}, "methods.eagle3"),
    ],
)
def test_whatever_changed_is_named_and_measured_anew(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    killed = FakeDecoder("eagle3", stop_after=20)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [FakeDecoder("vanilla"), killed])
    report = run(tmp_path, pair(), **changes)
    assert report["verdict"]["processes"] == 1
    assert "measuring anew" in report["settings"]["resumed"]
    assert named in report["settings"]["resumed"]
    assert (tmp_path / "evaluation.jsonl.previous").exists()


def test_a_finished_evaluation_is_measured_again_and_not_shown_again(tmp_path: Path) -> None:
    run(tmp_path, pair())
    decoders = pair()
    run(tmp_path, decoders)
    assert isinstance(decoders[1], FakeDecoder)
    assert len(decoders[1].calls) == 2 + 36


def _failing() -> list[Decoder]:
    broken = fake_renderer(prompts()[4], [])
    # The shortest and the longest prompt warm up; prompt 4 is neither.
    return [FakeDecoder("vanilla"), FakeDecoder("eagle3", fail=lambda ids: list(ids) == broken)]


def test_a_failed_prompt_fails_the_run_and_names_the_cell(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="planted failure") as caught:
        run(tmp_path, _failing())
    assert "task-4" in caught.value.__notes__[0]


def test_a_failed_prompt_can_be_left_out_for_every_method_and_counted(tmp_path: Path) -> None:
    settings = EvaluationSettings(max_new_tokens=9, dtype="float32", on_failure="exclude")
    report = run(tmp_path, _failing(), settings=settings)
    assert {row["prompts"] for row in report["results"]} == {11}
    assert list(report["verdict"]["excluded_prompts"]) == ["task/task-4"]
    assert check_of(report, "excluded")["level"] == "warning"
    frame = pd.read_parquet(tmp_path / "reports/per_prompt.parquet")
    assert "task-4" not in set(frame.prompt_id)


def test_a_prompt_too_long_for_the_warm_up_can_be_left_out(tmp_path: Path) -> None:
    longest = max((fake_renderer(item, []) for item in prompts()), key=len)
    settings = EvaluationSettings(max_new_tokens=9, dtype="float32", on_failure="exclude")
    broken = FakeDecoder("eagle3", fail=lambda ids: len(ids) >= len(longest))
    report = run(tmp_path, [FakeDecoder("vanilla"), broken], settings=settings)
    assert report["verdict"]["excluded_prompts"]
    assert report["settings"]["warm_up"]["eagle3"]
    with pytest.raises(ValueError, match="planted failure") as caught:
        run(tmp_path / "fail", [FakeDecoder("vanilla"), broken])
    assert "warming up" in caught.value.__notes__[0]


def test_an_exclusion_survives_a_kill() -> None:
    settings = EvaluationSettings(max_new_tokens=9, dtype="float32", on_failure="exclude")
    blocks = [Block(0, 0.0, item) for item in prompts(6)]
    records = list(
        measure(arms(_failing()), blocks, fake_renderer, settings, {}, excluded=[("task", "task-4")])
    )
    assert not any(isinstance(record, Failure) for record in records)
    assert {record.key.prompt_id for record in records} == {f"task-{index}" for index in (0, 1, 2, 3, 5)}


def test_answers_of_one_token_are_reported_without_a_speedup(tmp_path: Path) -> None:
    report = run(
        tmp_path, [FakeDecoder(name, spoil=lambda tokens: tokens[:1]) for name in ("vanilla", "eagle3")]
    )
    row = row_of(report, "eagle3")
    assert row["tokens"] == row["generations"] == 12
    assert row["speedup"] is row["speedup_low"] is row["tokens_per_second"] is row["tau"] is None
    assert row["end_to_end_speedup"] == pytest.approx(1.0)


def test_slow_and_useless_drafts_are_said_plainly(tmp_path: Path) -> None:
    class Useless(FakeDecoder):
        """Drafts 3 tokens a round and is never right."""

        def generate(self, *arguments: Any) -> Any:
            generation = super().generate(*arguments)
            wasted = [
                type(item)(4, 3, 0, 1, item.draft_seconds, item.verify_seconds, item.accept_seconds, 0.0)
                for item in generation.rounds
                for _ in range(item.produced)
            ]
            return type(generation)(
                generation.token_ids, generation.finish_reason, 0.5, generation.decode_seconds, tuple(wasted)
            )

    report = run(tmp_path, [FakeDecoder("vanilla"), Useless("eagle3", token_seconds=1.5, round_tokens=4)])
    row = row_of(report, "eagle3")
    assert row["tau"] == 1.0
    assert row["slower_than_vanilla"]
    assert "below 1.2" in check_of(report, "tau")["sentence"]
    assert "eagle3 (0.67×" in check_of(report, "slower")["sentence"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["eagle3"], "exactly one must be named 'vanilla'"),
        (["vanilla", "vanilla"], "exactly one must be named 'vanilla'"),
        (["vanilla", "vanilla-aa"], "added by itself"),
        (["vanilla", "eagle3", "eagle3"], "name of its own"),
    ],
)
def test_ambiguous_methods_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arms([FakeDecoder(name) for name in names])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([Prompt("task", "a", ("x",)), Prompt("task", "a", ("y",))], "occurs twice"),
        ([Prompt("task", "a", ())], "no turn"),
    ],
)
def test_unusable_prompts_are_refused(tmp_path: Path, items: list[Prompt], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, pair(), items)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
        ({"repeats": 0}, "repeats is 0"),
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (1.0, 1.0)}, "every temperature once"),
        ({"dtype": "int8"}, "int8"),
        ({"tie_tolerance": -0.1}, "tie_tolerance is -0.1"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**{"max_new_tokens": 8, "dtype": "float32", **values})
