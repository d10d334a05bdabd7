"""A study resumes after any kill, and refuses to mix times that do not compare."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from filelock import FileLock

from eagle3.measure.lock import timing_lock
from eagle3.tuning import study as study_module
from eagle3.tuning.heartbeat import quietly
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.study import known_configurations, make_sampler, ranked
from eagle3.tuning.trial import TrialResult
from tests.tuning.fakes import SPACE, measurement, open_study

CHAIN = Configuration("eagle3", 3, 1, 4, "bfloat16", 0)
TREE = Configuration("eagle3", 2, 2, 5, "bfloat16", 0)


def result(speedups: list[float], stopped: str | None = None) -> TrialResult:
    return TrialResult(measurement(speedups), stopped, 0.0, 3.0)


def test_records_survive_reopening(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study.enqueue(CHAIN, "chain")
    asked = study.ask()
    assert (asked.configuration, asked.source) == (CHAIN, "chain")
    study.tell(asked, result([2.0, 2.0]), measurement([2.0, 2.0]))
    records = open_study(tmp_path).records()
    assert records == study.records()
    assert records[0].known == measurement([2.0, 2.0])
    assert study.optuna.best_value == pytest.approx(2.0)


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_drafts_in_int8_are_sampled_stored_and_read_back(tmp_path: Path, sampler: str) -> None:
    space = Space(("eagle3",), 5, 4, 16, ("bfloat16", "int8"), (0,))
    study = open_study(tmp_path, sampler, space)
    study.enqueue(replace(CHAIN, draft_dtype="int8"), "chain")
    for _ in range(12):
        study.tell(study.ask(), result([2.0]), measurement([2.0]))
    records = open_study(tmp_path, sampler, space).records()
    assert records[0].configuration == replace(CHAIN, draft_dtype="int8")
    assert space.label(records[0].configuration) == "3/1/4 int8"
    sampled = {record.configuration.draft_dtype for record in records[1:] if record.configuration}
    assert sampled == {"bfloat16", "int8"}


def test_repeated_configurations_are_pooled(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for speedup in (2.0, 1.0):
        study.enqueue(CHAIN, "chain", even_if_known=True)
        asked = study.ask()
        known = known_configurations(study.records()).get(CHAIN)
        own = measurement([speedup] * 3)
        study.tell(asked, TrialResult(own, None, 0.0, 1.0), own if known is None else known + own)
    first, second = study.records()
    assert first.known is not None and second.known is not None  # noqa: PT018
    assert (first.known.repeats, second.known.repeats) == (1, 2)
    # 10 s vanilla; 5 s and 10 s: the median is 7.5.
    assert second.known.speedup() == pytest.approx(10 / 7.5)
    assert ranked(study.records())[0][1] == second.known


def test_stopped_trials_are_told_as_pruned_with_their_estimate(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study.enqueue(TREE, "tree")
    asked = study.ask()
    study.tell(asked, result([0.5], stopped="slower than 3/1/4"), measurement([0.5]))
    [record] = study.records()
    assert (record.state, record.reason) == ("pruned", "slower than 3/1/4")
    assert list(study.optuna.trials[0].intermediate_values.values()) == [pytest.approx(0.5)]
    assert ranked([record]) == []


def test_enqueuing_twice_tries_once(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study.enqueue(CHAIN, "chain")
    study.enqueue(CHAIN, "chain")
    study.enqueue(TREE, "tree")
    assert study.waiting == 2


def test_what_only_failed_is_named_until_it_is_queued_again(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for configuration in (CHAIN, TREE):
        study.enqueue(configuration, "default")
    study.tell_failed(study.ask(), "the server did not start")
    study.tell(study.ask(), result([2.0]), measurement([2.0]))
    assert study.without_result(study.records()) == {CHAIN}
    study.enqueue(CHAIN, "default")
    assert study.waiting == 0
    study.enqueue(CHAIN, "default", even_if_known=CHAIN in study.without_result(study.records()))
    assert study.waiting == 1
    assert study.without_result(study.records()) == set()
    study.tell(study.ask(), result([2.0]), measurement([2.0]))
    assert study.without_result(study.records()) == set()


@pytest.mark.parametrize("url", ["study.db", "nothing://user:secret@host/db"])
def test_a_storage_that_is_none_is_refused_in_words(url: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be opened .*: give a database URL") as refused:
        study_module.Study.open("tree", url, SPACE, {}, "tpe", 1)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_killed_trial_is_run_again(tmp_path: Path, sampler: str) -> None:
    study = open_study(tmp_path, sampler)
    study.enqueue(TREE, "tree")
    study.ask()
    resumed = open_study(tmp_path, sampler)
    assert resumed.revive() == [0]
    assert [record.state for record in resumed.records()] == ["fail"]
    again = resumed.ask()
    assert again.configuration == TREE
    assert again.source == "again, trial 0 was killed"
    resumed.tell(again, result([1.0]), measurement([1.0]))
    assert resumed.revive() == []


def test_a_queued_trial_killed_before_it_knew_its_configuration_is_queued_again(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study.enqueue(TREE, "chain")
    with quietly():
        study.optuna.ask()  # and killed here
    assert study.revive() == []  # another machine may just have asked
    execute(tmp_path, "UPDATE trials SET datetime_start = '2020-01-01 00:00:00.000000'")
    resumed = open_study(tmp_path)
    assert resumed.revive() == [0]
    again = resumed.ask()
    assert (again.configuration, again.source) == (TREE, "chain")


def execute(folder: Path, statement: str) -> None:
    """Change the storage behind the study's back."""
    with closing(sqlite3.connect(folder / "sweep.db")) as connection, connection:
        assert connection.execute(statement).rowcount == 1


def test_other_machines_trials_are_run_again_once_they_give_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file as well, which may lie on a network; a restarted container is another machine."""
    study = open_study(tmp_path)
    study.enqueue(TREE, "tree")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(study_module, "machine_name", lambda: "elsewhere")
        asked = study.ask()
    with study.beating(asked):
        pass
    mine = open_study(tmp_path)
    assert mine.revive() == []
    long_ago = "UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'"
    execute(tmp_path, long_ago)
    with study.beating(asked):
        pass
    assert mine.revive() == []
    execute(tmp_path, long_ago)
    assert mine.revive() == [0]
    assert [(record.state, record.reason) for record in mine.records()] == [("fail", "killed")]
    assert mine.ask().configuration == TREE
    assert mine.revive() == [1]


def test_other_conditions_are_refused_with_what_differs_and_the_way_out(tmp_path: Path) -> None:
    open_study(tmp_path)
    with pytest.raises(ValueError, match=r"machine\.cpu was \"A\" and is \"B\"") as caught:
        open_study(tmp_path, machine={"cpu": "B", "cores": 2})
    assert "--study" in str(caught.value)
    assert "cores" not in str(caught.value)
    open_study(tmp_path)


def test_identity_is_compared_as_stored(tmp_path: Path) -> None:
    """Tuples come back as lists: that is no difference."""
    open_study(tmp_path, workload={"temperatures": (0.0,)})
    open_study(tmp_path, workload={"temperatures": (0.0,)})


def test_resumed_sampler_does_not_repeat_its_first_choices(tmp_path: Path) -> None:
    first = open_study(tmp_path).ask().configuration
    (tmp_path / "sweep.db").rename(tmp_path / "before.db")
    assert open_study(tmp_path).ask().configuration == first
    assert open_study(tmp_path).ask().configuration != first


def test_storage_names_no_mlflow_table(tmp_path: Path) -> None:
    open_study(tmp_path)
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_learn_beside_chains(tmp_path: Path, sampler: str) -> None:
    """Chains lack a parameter that trees have, which must not break what models them jointly."""
    study = open_study(tmp_path, sampler)
    for configuration in [CHAIN, TREE, *list(SPACE.configurations())[::17]][:11]:
        study.enqueue(configuration, "given")
        asked = study.ask()
        study.tell(asked, result([1.0 / asked.configuration.num_steps]), measurement([1.0]))
    parameters = study.optuna.sampler.infer_relative_search_space(study.optuna, study.optuna.trials[-1])
    assert sampler == "tpe" or set(parameters) == {"num_steps", "topk", "fill"}
    assert SPACE.contains(study.ask().configuration)


def test_second_timing_worker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        FileLock(path),
        pytest.raises(ValueError, match="another evaluation or sweep"),
        timing_lock(path),
    ):
        pytest.fail("two workers timed at once")
    with timing_lock(path):
        pass


def test_grid_needs_no_sampler_of_its_own() -> None:
    assert isinstance(make_sampler("grid", 0), optuna.samplers.TPESampler)
    assert json.dumps(CHAIN.as_dict())
