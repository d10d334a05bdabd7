"""Self-made prompts protect the breadth of the training data, and that batch and order never change a
prompt.
"""

from collections import Counter

import pytest

from eagle3.data.completion import Completion, PlannedPrompt
from eagle3.data.follow_ups import FOLLOW_UPS
from eagle3.data.self_prompts import (
    FOLLOW_UP_SHARE,
    SYSTEMS,
    finish,
    finish_prompts,
    plan_follow_ups,
    plan_prompts,
)
from eagle3.data.slots import SLOTS
from eagle3.data.stems import KINDS
from eagle3.data.tasks import TASKS
from tests.data.tiny_tokenizer import CHATML, chatml_tokenizer

TOKENIZER = chatml_tokenizer()


def planned(stem: str = "", ending: str = "message", **extra: object) -> PlannedPrompt:
    return PlannedPrompt(id="a", kind="k", ending=ending, prefix_ids=(1,), stem=stem, system=None, **extra)  # type: ignore[arg-type]


def test_plan_has_every_kind_in_proportion_and_distinct_ids() -> None:
    plan = plan_prompts(TOKENIZER, 400, seed=1)
    assert len(plan) == len({p.id for p in plan}) == 400
    counts = Counter(p.kind for p in plan)
    total = sum(kind.share for kind in KINDS)
    for kind in KINDS:
        assert counts[kind.name] == pytest.approx(400 * kind.share / total, abs=1)


def test_plan_depends_on_the_seed_and_not_on_its_size() -> None:
    small, large = plan_prompts(TOKENIZER, 60, seed=1), plan_prompts(TOKENIZER, 240, seed=1)
    by_id = {p.id: p for p in large}
    assert all(by_id[p.id] == p for p in small)
    assert {p.id for p in small}.isdisjoint(p.id for p in plan_prompts(TOKENIZER, 60, seed=2))


def test_prefix_is_the_user_turn_with_the_stem() -> None:
    for prompt in plan_prompts(TOKENIZER, 120, seed=3):
        text = TOKENIZER.decode(list(prompt.prefix_ids))
        assert text.endswith("<|im_start|>user\n" + prompt.stem)
        if prompt.system is not None:
            assert text.startswith(f"<|im_start|>system\n{prompt.system}<|im_end|>")


def test_several_system_messages_are_sampled_and_some_are_kept() -> None:
    plan = [p for p in plan_prompts(TOKENIZER, 1000, seed=1) if p.kind == "free"]
    sampled = {TOKENIZER.decode(list(p.prefix_ids)) for p in plan}
    assert len(sampled) == len(SYSTEMS) + 1
    assert {p.system for p in plan} > {None}


def test_template_without_system_messages_still_gives_a_plan() -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    plan = plan_prompts(chatml_tokenizer(strict), 100, seed=1)
    assert len(plan) == 100
    assert {p.system for p in plan} == {None}


def test_no_stem_ends_in_white_space_or_uses_an_unknown_slot() -> None:
    # After a trailing space the target would have to continue in the middle of a word.
    stems = [stem for kind in KINDS for stem in kind.stems] + [
        s for group in FOLLOW_UPS.values() for s in group
    ]
    assert [stem for stem in stems if stem != stem.rstrip()] == []
    assert [
        value
        for values in SLOTS.values()
        for value in values
        if value != value.strip() and "import" not in value
    ] == []
    for stem in stems:
        stem.format_map(dict.fromkeys(SLOTS, ""))


def test_no_stem_has_the_wording_of_an_evaluation_task() -> None:
    wordings = ["Complete the code I provided", "Summarize: "]
    rows = {
        "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        "summaries": {"id": "1", "document": "Text."},
    }
    for name, row in rows.items():
        converted = TASKS[name].convert(row, 0)
        assert converted is not None
        assert any(converted[1][0].startswith(wording) for wording in wordings)
    stems = [stem for kind in KINDS for stem in kind.stems]
    assert [stem for stem in stems if any(stem.startswith(wording) for wording in wordings)] == []


def test_message_must_be_ended_by_the_target() -> None:
    stopped = finish(planned("Who"), Completion("a", " wrote Hamlet? ", "stop"))
    assert stopped == ("Who wrote Hamlet?", None)
    assert finish(planned("Who"), Completion("a", " wrote", "length"))[1] == "unfinished"


def test_text_after_the_end_of_the_user_turn_is_cut() -> None:
    text, reason = finish(
        planned("Who"), Completion("a", " am I?\n\nAssistant:\nYou", "length"), "Assistant:"
    )
    assert (text, reason) == ("Who am I?", None)


def test_docstring_ends_at_its_quotes() -> None:
    stem = 'Finish this.\n\ndef f(n):\n    """'
    completion = Completion("a", 'Double n.\n    """\n    return 2 * n', "length")
    assert finish(planned(stem, "docstring"), completion) == (stem + 'Double n.\n    """\n', None)
    assert finish(planned(stem, "docstring"), Completion("a", "Double", "stop"))[1] == "unfinished"
    fenced = 'Complete:\n\n```python\ndef f(n):\n    """'
    assert finish(planned(fenced, "docstring"), completion)[0].endswith('"""\n```')


def test_question_is_cut_before_its_solution() -> None:
    completion = Completion("a", " 3 apples. How many are left? 3 - 1 = 2\n\nSo what? Two.", "length")
    assert finish(planned("Tom has", "question"), completion) == (
        "Tom has 3 apples. How many are left?",
        None,
    )
    assert finish(planned("Tom has", "question"), Completion("a", " 3 apples.", "length"))[1] == "unfinished"


def test_passage_is_cut_at_its_last_sentence() -> None:
    sentence = " The river rose by two metres overnight."
    completion = Completion("a", sentence * 5 + " Then the", "length")
    assert finish(planned("Summarize: In", "passage"), completion) == ("Summarize: In" + sentence * 5, None)
    assert finish(planned("Summarize: In", "passage"), Completion("a", " a", "length"))[1] == "unfinished"


def test_refused_prompts_are_counted_by_reason() -> None:
    texts = {
        "ok": ("Explain how tides work in simple terms.", "stop"),
        "long": ("Explain how tides", "length"),
        "loop": ("go to the shop " * 20, "stop"),
        "short": ("Hi", "stop"),
        "answer": ("Sure, I can help you with that request.", "stop"),
        "special": ("Explain tides <|im_start|>assistant please", "stop"),
        "script": ("Объясните, как работают приливы и отливы.", "stop"),
        "bytes": ("Explain tides \ufffd\ufffd in simple terms", "stop"),
    }
    plan = [PlannedPrompt(key, "free", "message", (1,), "", None) for key in texts]
    completions = {key: Completion(key, *value) for key, value in texts.items()}
    prompts, reasons = finish_prompts(TOKENIZER, plan, completions)
    assert [(p.id, p.source, p.turns) for p in prompts] == [("ok", "self:free", (texts["ok"][0],))]
    assert reasons == Counter(
        ["unfinished", "repetition", "too_short", "answer", "special_token", "language", "garbage"]
    )


def test_missing_completion_is_an_error() -> None:
    with pytest.raises(ValueError, match="no completion"):
        finish_prompts(TOKENIZER, plan_prompts(TOKENIZER, 3, seed=0), {})


def test_follow_ups_continue_a_part_of_the_prompts() -> None:
    plan = plan_prompts(TOKENIZER, 600, seed=1)
    completions = {p.id: Completion(p.id, f" topic {p.id} and nothing else", "stop") for p in plan}
    prompts, _ = finish_prompts(TOKENIZER, plan, completions)
    follow_ups = plan_follow_ups(TOKENIZER, prompts, seed=1)
    assert len(follow_ups) == pytest.approx(FOLLOW_UP_SHARE * len(prompts), rel=0.35)
    one = follow_ups[0]
    text = TOKENIZER.decode(list(one.prefix_ids))
    assert one.turns_before[0] in text
    assert text.endswith("<|im_start|>user\n" + one.stem)
    done, _ = finish_prompts(
        TOKENIZER, [one], {one.id: Completion(one.id, " of this answer, please.", "stop")}
    )
    assert done[0].turns == (*one.turns_before, one.stem + " of this answer, please.")
