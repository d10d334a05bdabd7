"""The whole path on tiny real models: chat template, two turns, drafting, comparison by the target."""

import json
from typing import Any

import pytest

from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.generation import Decoder
from eagle3.decoding.prompt_lookup import PromptLookupDrafter
from eagle3.decoding.tree import TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.measure.evaluation import evaluate
from eagle3.measure.losslessness import target_rescorer
from eagle3.measure.rendering import ChatRenderer, Prompt
from eagle3.measure.settings import EvaluationSettings
from eagle3.models.target import Target
from tests.decoding.drafts import random_draft

PROMPTS = [
    Prompt("chat", "1", ("Why is the sky blue?", "And the sea?")),
    Prompt("chat", "2", ("Name three numbers.", "Now their sum."), system="You count."),
    Prompt("code", "1", ("Write a function that returns the largest number.",)),
]


def decoders(target: Target) -> list[Decoder]:
    tree = EagleDrafter(random_draft(target), TreeShape(3, 2, 6))
    return [
        VanillaDecoder(target),
        SpeculativeDecoder(target, tree, "eagle3"),
        SpeculativeDecoder(target, PromptLookupDrafter(4), "prompt-lookup"),
    ]


@pytest.fixture(scope="module")
def report(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("evaluation")
    evaluate(
        decoders(tiny_target),
        PROMPTS,
        ChatRenderer(tiny_target.tokenizer, tiny_target.eos_token_ids),
        target_rescorer(tiny_target),
        EvaluationSettings(max_new_tokens=12, dtype="float32", temperatures=(0.0, 1.0), repeats=2),
        machine={},
        subject={},
        reports=folder,
        journal=folder / "journal.jsonl",
        progress=False,
    )
    report: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return report


def test_random_drafts_are_lossless(report: dict[str, Any]) -> None:
    for row in report["results"]:
        expected = 0 if row["temperature"] else row["generations"]
        assert row["lossless"]["compared"] == row["lossless"]["exact"] == expected
        assert row["repeatable"]


def test_every_method_answered_every_turn(report: dict[str, Any]) -> None:
    overall = [row for row in report["results"] if row["task"] == "all"]
    assert len(overall) == 4 * 2
    assert {row["prompts"] for row in overall} == {3}
    assert {row["generations"] for row in overall} == {5}


def test_tokens_add_up(report: dict[str, Any]) -> None:
    # Every new token is a prefill's or a round's: the identity breaks if either is counted in the other.
    for row in report["results"]:
        if row["rounds"]:
            assert row["tau"] * row["rounds"] == pytest.approx(row["tokens"] - row["generations"])
            assert sum(row["acceptance_histogram"]) == row["rounds"]


def test_second_turns_continue_the_exact_answer(tiny_target: Target) -> None:
    renderer = ChatRenderer(tiny_target.tokenizer, tiny_target.eos_token_ids)
    first = renderer(PROMPTS[0], [])
    answer = [70, 71, 72]
    end = tiny_target.tokenizer.eos_token_id
    cut = renderer(PROMPTS[0], [answer])
    ended = renderer(PROMPTS[0], [[*answer, end]])
    assert cut == ended  # an answer cut at the limit is closed as the template closes one
    assert cut[: len(first) + 4] == [*first, *answer, end]
    assert tiny_target.tokenizer.decode(cut[len(first) + 4 :]) == (
        "\n<|im_start|>user\nAnd the sea?<|im_end|>\n<|im_start|>assistant\n"
    )
