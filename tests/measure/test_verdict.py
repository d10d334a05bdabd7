"""The verdict must refuse what cannot be believed, and must not cry wolf."""

from typing import Any

import pytest

from eagle3.measure.verdict import Circumstances, judge, reservations

LOAD = {"load_average": [0.1, 0.1, 0.1], "available_gib": 8.0}


def row(method: str, **changes: Any) -> dict[str, Any]:
    compared = {"compared": 20, "exact": 20, "near_ties": 0, "failures": 0}
    speculative = not method.startswith("vanilla")
    return {
        "method": method,
        "task": "all",
        "temperature": 0.0,
        "tau": 3.0 if speculative else 1.0,
        "rounds": 100 if speculative else 0,
        "acceptance_reached": [100, 80] if speculative else [],
        "speedup": 2.0 if speculative else 1.0,
        "speedup_low": 1.9 if speculative else 0.99,
        "speedup_high": 2.1 if speculative else 1.01,
        "end_to_end_speedup_low": 1.8 if speculative else 0.99,
        "end_to_end_speedup_high": 2.0 if speculative else 1.01,
        "slower_than_vanilla": False,
        "prompts": 20,
        "repeat_spread": 0.02,
        "repeatable": True,
        "lossless": compared,
        **changes,
    }


def verdict(
    *changed: dict[str, Any], foreign: float = 0.01, repeats: int = 3, excluded: dict[str, str] | None = None
) -> dict[str, Any]:
    given = (row("vanilla"), row("vanilla-aa"), row("eagle3"), *changed)
    rows = {(item["method"], item["task"]): item for item in given}
    loads = {"start": LOAD, "end": LOAD}
    return judge(list(rows.values()), Circumstances(repeats, foreign, foreign, excluded or {}, 1, loads))


def levels(judged: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["level"] for check in judged["checks"]}


def sentences(judged: dict[str, Any]) -> list[str]:
    return [check["sentence"] for check in judged["checks"]]


def test_a_clean_evaluation_is_trusted_without_reservation() -> None:
    judged = verdict()
    assert judged["trustworthy"]
    assert set(levels(judged).values()) == {"ok"}
    assert judged["summary"] == "These numbers can be trusted: all checks passed."


def test_an_aa_interval_without_1_is_a_failure() -> None:
    judged = verdict(row("vanilla-aa", speedup=0.95, speedup_low=0.94, speedup_high=0.96))
    assert not judged["trustworthy"]
    assert levels(judged)["a/a"] == "failure"
    assert "5.0%" in judged["checks"][0]["sentence"]
    assert reservations(judged) == [judged["checks"][0]["sentence"]]


def test_an_aa_interval_that_misses_1_by_little_warns() -> None:
    """1 of 20 sound evaluations has such an interval."""
    judged = verdict(row("vanilla-aa", speedup=0.97, speedup_low=0.945, speedup_high=0.995))
    assert judged["trustworthy"]
    assert levels(judged)["a/a"] == "warning"
    assert "3.0%" in judged["checks"][0]["sentence"]


def test_an_aa_interval_with_1_says_what_it_cannot_see() -> None:
    judged = verdict(row("vanilla-aa", speedup=1.01, speedup_low=0.98, speedup_high=1.05))
    assert "differences below ±3.5% cannot be seen" in judged["checks"][0]["sentence"]


def test_an_aa_arm_without_interval_proves_nothing() -> None:
    judged = verdict(row("vanilla-aa", speedup_low=None, speedup_high=None, prompts=1))
    assert levels(judged)["a/a"] == "warning"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            row(
                "vanilla-aa", task="gsm8k", speedup_low=0.92, speedup_high=0.98, end_to_end_speedup_high=0.99
            ),
            "gsm8k at temperature 0, decoding: 0.920 to 0.980",
        ),
        (
            row("vanilla-aa", end_to_end_speedup_low=1.01, end_to_end_speedup_high=1.07),
            "all tasks at temperature 0, end to end: 1.010 to 1.070",
        ),
    ],
    ids=["a task", "end to end"],
)
def test_aa_intervals_without_1_in_parts_warn(changed: dict[str, Any], said: str) -> None:
    """The decode speedup over all tasks decides on trust; by task and end to end methods are compared too."""
    judged = verdict(changed)
    assert judged["trustworthy"]
    (check,) = [check for check in judged["checks"] if check["name"] == "a/a in parts"]
    assert check["level"] == "warning"
    assert said in check["sentence"]


def test_an_aa_interval_without_1_in_a_part_is_said_and_warns_no_oftener_than_chance() -> None:
    judged = verdict(row("vanilla-aa", task="gsm8k", speedup_low=0.92, speedup_high=0.98))
    assert reservations(judged) == []
    (check,) = [check for check in judged["checks"] if check["name"] == "a/a in parts"]
    assert "1 of 3 intervals miss 1, as chance allows: gsm8k at temperature 0, decoding" in check["sentence"]


def test_few_prompts_of_a_task_warn_though_all_tasks_have_enough() -> None:
    assert levels(verdict(row("eagle3", task="gsm8k", prompts=4)))["prompts of a task"] == "warning"
    both = levels(verdict(row("eagle3", prompts=4), row("eagle3", task="gsm8k", prompts=4)))
    assert "prompts of a task" not in both, "one task: said once"


def test_one_lossless_failure_is_a_failure() -> None:
    lossless = {"compared": 20, "exact": 19, "near_ties": 0, "failures": 1}
    judged = verdict(row("eagle3", lossless=lossless))
    assert not judged["trustworthy"]
    assert levels(judged)["lossless"] == "failure"


def test_near_ties_are_counted_and_accepted() -> None:
    lossless = {"compared": 20, "exact": 18, "near_ties": 2, "failures": 0}
    judged = verdict(row("eagle3", lossless=lossless))
    assert levels(judged)["lossless"] == "ok"
    assert "except 2 that part at a near tie" in str(judged["checks"])


def test_only_methods_are_counted_as_lossless() -> None:
    """The A/A arm has answers that equal vanilla's too, and proves nothing about the methods."""
    assert "The method gives vanilla's 20 greedy answers token by token." in sentences(verdict())
    two = sentences(verdict(row("eagle")))
    assert "Each of the 2 methods gives vanilla's 20 greedy answers token by token." in two
    nothing = {"compared": 0, "exact": 0, "near_ties": 0, "failures": 0}
    assert levels(verdict(row("eagle3", lossless=nothing)))["lossless"] == "warning"


def test_nothing_compared_is_not_called_lossless() -> None:
    nothing = {"compared": 0, "exact": 0, "near_ties": 0, "failures": 0}
    judged = verdict(*(row(name, lossless=nothing) for name in ("vanilla", "vanilla-aa", "eagle3")))
    assert levels(judged)["lossless"] == "warning"


@pytest.mark.parametrize(("tau", "warned"), [(1.19, True), (1.2, False)])
def test_tau_near_1_warns(tau: float, warned: bool) -> None:
    assert ("tau" in levels(verdict(row("eagle3", tau=tau)))) is warned


def test_a_low_tau_is_laid_to_wrong_drafts_only_where_there_were_drafts() -> None:
    wrong = row("eagle3", tau=1.1, rounds=1000, acceptance_reached=[1000, 50])
    (sentence,) = reservations(verdict(wrong))
    assert "hardly ever right" in sentence
    for reached, drafted in (([120, 30], 120), ([], 0)):
        seldom = row("prompt-lookup", tau=1.1, rounds=1000, acceptance_reached=reached)
        (sentence,) = reservations(verdict(seldom))
        assert f"it drafts in {drafted} of 1,000 rounds only" in sentence
        assert "hardly ever right" not in sentence


@pytest.mark.parametrize(
    ("judged", "name"),
    [
        (verdict(foreign=0.4), "load"),
        (verdict(row("vanilla", repeat_spread=0.3)), "noise"),
        (verdict(row("eagle3", prompts=5)), "prompts"),
        (verdict(repeats=2), "repeats"),
        (verdict(row("eagle3", repeatable=False)), "repeatable"),
        (verdict(excluded={"task/1": "ValueError: too long"}), "excluded"),
    ],
)
def test_reservations_are_warnings(judged: dict[str, Any], name: str) -> None:
    assert judged["trustworthy"]
    assert levels(judged)[name] == "warning"
    assert judged["summary"].endswith("1 check warns.")


def test_noise_is_not_claimed_of_a_single_repeat() -> None:
    assert "noise" not in levels(verdict(repeats=1))


def test_a_method_slower_than_vanilla_is_named_and_no_doubt_about_the_numbers() -> None:
    judged = verdict(row("eagle3", slower_than_vanilla=True, speedup=0.8))
    assert "Slower than vanilla on this machine: eagle3 (0.80× at temperature 0)." in sentences(judged)
    assert reservations(judged) == []
    assert judged["summary"] == "These numbers can be trusted: all checks passed."
