"""From few configurations whose costs follow the formulas, the model finds costs and acceptance."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.report.sweep_figures import estimated_trials, parameter_importances, write_figures
from eagle3.tuning.cost_model import (
    Acceptance,
    CostModel,
    Costs,
    fit_acceptance,
    level_width,
)
from eagle3.tuning.measurement import Measurement, PromptTimes, Rounds
from eagle3.tuning.predictions import Predictions
from eagle3.tuning.predictor import Predictor, unseen_speedups
from eagle3.tuning.preview import describe_other_machine
from eagle3.tuning.results import sweep_results
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.study import Record

SPACE = Space(("eagle3",), 6, 8, 64, ("bfloat16",), (0,))
TRUTH = CostModel(
    Acceptance((0.6, 0.5, 0.4, 0.4, 0.4), 0.3),
    Costs(0.030, (0.027, 0.002), (0.002, 0.003, 0.0005), (0.001, 0.0)),
)
TREES = [(1, 1, 2), (3, 1, 4), (5, 1, 6), (2, 2, 5), (3, 4, 12), (5, 4, 8), (5, 8, 64), (4, 2, 16)]


def configuration(tree: tuple[int, int, int]) -> Configuration:
    return Configuration("eagle3", *tree, "bfloat16", 0)


def follows_the_truth(item: Configuration, rounds: int = 2000) -> Measurement:
    """A measurement without noise, of so many rounds."""
    width, reached, accepted, before = level_width(item), [], [], rounds
    for depth in range(item.num_steps):
        reached.append(before)
        before = round(before * TRUTH.acceptance.at(depth, width))
        accepted.append(before)
    produced = rounds + sum(accepted)
    costs, forwards = TRUTH.costs, item.num_steps - 1
    verify = costs.verify[0] + costs.verify[1] * item.num_draft_tokens
    draft = costs.draft[0] + forwards * (costs.draft[1] + costs.draft[2] * item.topk)
    seconds = rounds * (verify + draft + costs.other[0])
    times = PromptTimes((costs.vanilla_token * produced,), (seconds,), produced, produced, True)
    parts = Rounds(
        rounds,
        produced,
        seconds,
        rounds * draft,
        rounds * verify,
        0.0,
        0.0,
        tuple(reached),
        tuple(accepted),
    )
    return Measurement({"task/0": times, "task/1": times}, parts)


def measured(trees: list[tuple[int, int, int]] = TREES) -> dict[Configuration, Measurement]:
    return {configuration(tree): follows_the_truth(configuration(tree)) for tree in trees}


def records() -> list[Record]:
    return [
        Record(number, "complete", item, found, found, "tpe", "", 3.0, 0.0)
        for number, (item, found) in enumerate(measured().items())
    ]


def test_trees_that_end_by_confidence_teach_the_model_nothing_and_are_not_predicted() -> None:
    """Their size is not known beforehand: the formulas do not hold for them."""
    known = {configuration(tree): follows_the_truth(configuration(tree)) for tree in TREES}
    cut = replace(configuration((5, 8, 64)), confidence=0.2)
    with_cut = {**known, cut: follows_the_truth(configuration((1, 1, 2)))}
    predictor = Predictor.fit(known)
    assert Predictor.fit(with_cut) == predictor
    assert cut not in unseen_speedups(with_cut)
    assert predictor.speedup(cut) is None
    assert predictor.speedup(configuration((5, 8, 64))) is not None


def test_acceptance_is_found() -> None:
    found = fit_acceptance(measured())
    assert found.by_depth == pytest.approx(TRUTH.acceptance.by_depth, abs=0.02)
    assert found.width_exponent == pytest.approx(0.3, abs=0.03)


def test_tau_counts_the_bonus_token() -> None:
    # 1 + 0.6 + 0.6 * 0.5 for a chain of two.
    assert TRUTH.acceptance.tau(configuration((2, 1, 3))) == pytest.approx(1.9)


def test_unmeasured_configurations_are_predicted() -> None:
    model = CostModel.fit(measured())
    assert model is not None
    for tree in [(2, 1, 3), (4, 1, 5), (3, 2, 8), (6, 6, 32)]:
        expected = follows_the_truth(configuration(tree)).speedup()
        assert model.speedup(configuration(tree)) == pytest.approx(expected, rel=0.03)
    best = max(SPACE.configurations(), key=model.speedup)
    assert TRUTH.speedup(best) == pytest.approx(max(map(TRUTH.speedup, SPACE.configurations())), rel=0.02)


def test_error_is_of_models_that_did_not_see_the_configuration() -> None:
    found = measured()
    odd = configuration((5, 8, 64))
    slow = found[odd]
    times = {key: PromptTimes((1.0,), (10.0,), 10, 10, True) for key in slow.prompts}
    found[odd] = Measurement(times, slow.rounds)
    assert found[odd].speedup() == pytest.approx(0.1)
    assert unseen_speedups(found)[odd] > 0.3


def test_servers_tell_whole_rounds_and_levels_are_not_free() -> None:
    """More levels of the same budget cost draft steps, also where no part of a round is known."""
    served = {
        item: Measurement(
            found.prompts,
            replace(found.rounds, draft_seconds=0.0, verify_seconds=0.0),
        )
        for item, found in measured().items()
    }
    model = CostModel.fit(served)
    assert model is not None
    assert not model.costs.by_part
    # The costs are the truth's; what is fixed belongs to no part.
    assert model.costs.verify == pytest.approx((0.0, 0.002), rel=0.02)
    assert model.costs.draft == pytest.approx((0.0, 0.003, 0.0005), rel=0.02)
    assert model.costs.other == pytest.approx((0.030, 0.0), rel=0.02)
    for tree in [(2, 1, 3), (3, 2, 8), (6, 6, 32)]:
        expected = follows_the_truth(configuration(tree)).speedup()
        assert model.speedup(configuration(tree)) == pytest.approx(expected, rel=0.03)
    assert CostModel.fit(dict(list(served.items())[:3])) is None


def test_options_have_models_of_their_own() -> None:
    """Half as fast with one thread: measurements with one say nothing about those with two."""
    space = Space(("eagle3",), 6, 8, 64, ("bfloat16",), (0, 1, 2))
    known = measured()
    for tree in TREES:
        fast = follows_the_truth(configuration(tree))
        rounds = {
            key: 2 * getattr(fast.rounds, key)
            for key in ("decode_seconds", "draft_seconds", "verify_seconds")
        }
        times = {key: replace(item, seconds=(2 * item.seconds[0],)) for key, item in fast.prompts.items()}
        known[replace(configuration(tree), threads=1)] = Measurement(times, replace(fast.rounds, **rounds))
    predictions = Predictions.of(known)
    chain = configuration((4, 1, 5))
    fast_speedup, slow_speedup = (
        predictions.predictor.speedup(replace(chain, threads=threads)) for threads in (0, 1)
    )
    assert fast_speedup is not None
    assert slow_speedup == pytest.approx(fast_speedup / 2, rel=0.02)
    assert predictions.predictor.speedup(replace(chain, threads=2)) is None  # nothing was measured with two
    summary = predictions.summary(space)
    assert summary is not None
    assert [row["threads"] for row in summary["models"]] == [0, 1]
    assert summary["median_relative_error"] < 0.05

    table = predictions.table(space)
    assert len(table) == len(list(space.configurations()))
    assert table["predicted"].isna().equals(table["threads"] == 2)
    seen = table.dropna(subset=["measured"])
    assert len(seen) == sum(space.contains(item) for item in known)
    assert seen["relative_error"].abs().median() < 0.05


def test_two_configurations_are_too_few() -> None:
    assert CostModel.fit(measured(TREES[:2])) is None
    assert CostModel.fit({}) is None


def test_flat_costs_favour_larger_trees() -> None:
    """Where verifying costs the same for any number of tokens, as on a GPU, the tree should be large."""
    here = CostModel.fit(measured())
    assert here is not None
    there = here.with_costs(Costs.flat(0.02, 0.0005))
    best_here = max(SPACE.configurations(), key=here.speedup)
    best_there = max(SPACE.configurations(), key=there.speedup)
    assert best_there.num_draft_tokens > best_here.num_draft_tokens
    text = describe_other_machine(records(), SPACE, 20.0, 0.5)
    assert f"{there.speedup(best_there):.2f}x" in text
    with pytest.raises(ValueError, match="above 0"):
        describe_other_machine(records(), SPACE, 0.0, 0.5)


def test_results_are_json_and_figures_are_drawn(tmp_path: Path) -> None:
    cost_model = Predictions.of(measured()).summary(SPACE)
    found = sweep_results(records(), {"machine": {}}, 0, {"held_out": []}, cost_model, {"command": "x"})
    json.dumps(found, allow_nan=False)
    model = found["cost_model"]
    assert model["median_relative_error"] < 0.05
    assert model["models"][0]["verify_ms"]["per_token"] == pytest.approx(2.0, rel=0.05)
    assert len(model["predictions"]) == 20
    names = {path.stem for path in write_figures(found, tmp_path)}
    assert names == {"trials", "slices", "contour", "importance", "cost_model"}
    assert sum(parameter_importances(estimated_trials(found)).values()) == pytest.approx(1.0)


def test_options_that_varied_are_in_the_figures(tmp_path: Path) -> None:
    found = sweep_results(records(), {"machine": {}}, 0, {"held_out": []}, None, {"command": "x"})
    for number, trial in enumerate(found["trials"]):
        trial["params"] = {**trial["params"], "threads": number % 2, "backend": "kernels"}
    assert "options" in {path.stem for path in write_figures(found, tmp_path)}
    importances = parameter_importances(estimated_trials(found))
    assert {"threads", "num_steps"} <= set(importances)
    assert "backend" not in importances


def test_stopped_trial_has_only_a_partial_speedup() -> None:
    stopped = [
        Record(0, "pruned", item, found, found, "tpe", "slower", 3.0, 0.0)
        for item, found in measured(TREES[:1]).items()
    ]
    [row] = sweep_results(stopped, {}, 0, {}, None, {})["trials"]
    assert row["speedup"] is None
    assert row["partial_speedup"] == pytest.approx(stopped[0].measurement.speedup())  # type: ignore[union-attr]
