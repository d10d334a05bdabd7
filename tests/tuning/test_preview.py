"""What a sweep tells beforehand is what it would do."""

import json
from pathlib import Path

from eagle3.tuning.preview import Expected, describe_plan, expected_trial_seconds, vanilla_token_seconds
from eagle3.tuning.space import Configuration
from eagle3.tuning.study import Record
from tests.measure.fakes import prompts
from tests.tuning.fakes import SPACE, measurement


def record(configuration: Configuration) -> Record:
    found = measurement([2.0, 2.0])
    return Record(0, "complete", configuration, found, found, "grid", "", 30.0, 0.0)


def test_expected_time_comes_from_trials_or_an_evaluation(tmp_path: Path) -> None:
    evaluation = tmp_path / "evaluation.json"
    assert expected_trial_seconds([], evaluation, 10, 48) is None
    assert vanilla_token_seconds([], evaluation) is None
    rows = [{"method": "vanilla", "task": "all", "tokens_per_second": 24.0}]
    evaluation.write_text(json.dumps({"results": rows}))
    assert expected_trial_seconds([], evaluation, 10, 48) == 40.0
    assert vanilla_token_seconds([], evaluation) == 1 / 24
    records = [record(next(SPACE.configurations()))]
    assert expected_trial_seconds(records, evaluation, 10, 48) == 30.0
    assert vanilla_token_seconds(records, evaluation) == 1.0


def test_a_grid_is_counted_by_its_own_points() -> None:
    points = [("grid", point) for point in SPACE.grid([1, 2, 3], [1], [2])]
    records = [record(points[0][1])]
    text = describe_plan(
        SPACE, points, 50, records, prompts(2), Expected(60.0, 600.0), grid=True, finalists=7
    )
    assert "the grid has 3 of them, 1 of which are measured" in text
    assert "2 trials left, about 2 min" in text
    assert "then 7 configurations on held-out prompts, about 10 min" in text
    few = describe_plan(SPACE, points, 2, records, prompts(2), Expected(60.0, None), grid=True, finalists=7)
    assert "1 trials left" in few
    sampled = describe_plan(SPACE, points, 50, records, prompts(2), Expected(60.0, None), finalists=7)
    assert "49 trials left, about 49 min" in sampled
    assert sampled.endswith("then 7 configurations on held-out prompts")
