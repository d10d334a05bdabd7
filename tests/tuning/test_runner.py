"""The loop finds the best configuration, wastes no measurement, and can be stopped at any moment."""

from collections.abc import Iterable
from pathlib import Path

import optuna
import pytest

from eagle3.tuning.runner import MOST_REPEATS, duration
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.study import Record, Study, known_configurations, measured, ranked
from tests.measure.fakes import FakeDecoder
from tests.tuning.fakes import SPACE, fake_decoder, open_study, runner

BEST = Configuration("eagle3", 3, 1, 4, "bfloat16", 0)
TINY = Space(("eagle3",), 2, 2, 4, ("bfloat16",), (0,))  # 1/1/2, 1/2/2, 1/2/3, 2/1/3, 2/2/3, 2/2/4


def enqueue(study: Study, configurations: Iterable[tuple[str, Configuration]]) -> None:
    for source, configuration in configurations:
        study.enqueue(configuration, source)


def test_known_configurations_come_first_and_the_best_is_found(tmp_path: Path) -> None:
    study, lines = open_study(tmp_path), list[str]()
    sweep = runner(study, 12, lines=lines)
    enqueue(study, SPACE.known().items())
    sweep.run()
    records = study.records()
    assert [record.source for record in records[:2]] == list(SPACE.known())
    assert ranked(records)[0][0] == BEST
    assert len(measured(records)) == 12
    assert "cost model" in [record.source for record in records]
    assert any(line.startswith("[12/12]") and "best 3/1/4 2.0" in line for line in lines)
    assert any("stopped: slower than 3/1/4" in line for line in lines)
    assert {record.state for record in measured(records)} == {"complete", "pruned"}


def test_running_again_goes_on_from_what_is_there(tmp_path: Path) -> None:
    runner(open_study(tmp_path), 4).run()
    lines: list[str] = []
    study = open_study(tmp_path)
    runner(study, 6, lines=lines).run()
    assert len(measured(study.records())) == 6
    assert [line.split()[0] for line in lines[:-1]] == ["[5/6]", "[6/6]"]
    runner(study, 6, lines=lines).run()
    assert lines[-1] == "6 trials are measured"


def test_known_configuration_is_tightened_while_it_may_win_and_not_measured_once_it_lost(
    tmp_path: Path,
) -> None:
    study = open_study(tmp_path, space=TINY)
    made: list[Configuration] = []

    def decoder_of(configuration: Configuration) -> FakeDecoder:
        made.append(configuration)
        return fake_decoder(configuration)

    lines: list[str] = []
    runner(study, 100, decoder_of, lines).run()
    known = known_configurations(study.records())
    assert set(known) == set(TINY.configurations())
    best = ranked(study.records())[0][0]
    assert made.count(best) == MOST_REPEATS == known[best].repeats
    # Before the best was measured another one was, and was tightened; once it lost, never again.
    first = made.index(best)
    assert all(made[first:].count(item) <= 1 for item in known if item != best)
    assert all(made.index(item) >= first or item not in made[first:] for item in known if item != best)
    assert "all 6 configurations are known" in lines[-1]
    told = [record for record in study.records() if record.measurement is None]
    assert all(record.state == "known" and "before" in record.reason for record in told)


def test_interrupted_trial_is_tracked_and_run_again(tmp_path: Path) -> None:
    study, ended = open_study(tmp_path), list[Record]()

    def interrupting(configuration: Configuration) -> FakeDecoder:
        decoder = fake_decoder(configuration)
        decoder.stop_after = 5
        return decoder

    sweep = runner(study, 3, interrupting, ended=ended)
    enqueue(study, [("chain", BEST)])
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert [(record.state, record.reason) for record in study.records()] == [("fail", "interrupted")]
    assert ended == study.records()
    resumed = open_study(tmp_path)
    assert resumed.revive() == []
    runner(resumed, 1).run()
    assert resumed.records()[1].configuration == BEST
    assert resumed.records()[1].state == "complete"


def test_killed_trial_is_tracked_and_run_again(tmp_path: Path) -> None:
    study, ended = open_study(tmp_path), list[Record]()
    enqueue(study, [("chain", BEST)])
    study.ask()  # and killed here
    runner(study, 1, ended=ended).run()
    killed, again = ended
    assert (killed.state, killed.reason) == ("fail", "killed")
    assert (again.state, again.source) == ("complete", "again, trial 0 was killed")
    assert killed.configuration == again.configuration == BEST


def test_a_trials_time_includes_the_start_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time left is estimated from it."""
    study, clock = open_study(tmp_path), [0.0]

    def starting(configuration: Configuration) -> FakeDecoder:
        clock[0] += 120.0
        return fake_decoder(configuration)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    runner(study, 1, starting).run()
    assert study.records()[0].seconds == 120.0


def test_single_failure_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    study, lines = open_study(tmp_path), list[str]()

    def failing(configuration: Configuration) -> FakeDecoder:
        decoder = fake_decoder(configuration)
        decoder.fail = lambda _: configuration == BEST
        return decoder

    sweep = runner(study, 3, failing, lines)
    enqueue(study, [("chain", BEST)])
    sweep.run()
    first = study.records()[0]
    assert (first.state, first.reason) == ("fail", "ValueError: planted failure")
    assert len(measured(study.records())) == 3


def test_a_configuration_that_fails_does_not_keep_a_small_space_from_ending(tmp_path: Path) -> None:
    study, lines = open_study(tmp_path, space=TINY), list[str]()
    bad = Configuration("eagle3", 1, 2, 2, "bfloat16", 0)

    def failing(configuration: Configuration) -> FakeDecoder:
        decoder = fake_decoder(configuration)
        decoder.fail = lambda _: configuration == bad
        return decoder

    enqueue(study, [("default", bad)])
    runner(study, 100, failing, lines).run()
    assert set(known_configurations(study.records())) == set(TINY.configurations()) - {bad}
    assert "5 configurations are known" in lines[-1]
    assert "1 failed" in lines[-1]


def test_a_trial_that_another_machine_failed_meanwhile_is_left_out(tmp_path: Path) -> None:
    study, lines = open_study(tmp_path), list[str]()

    def taken_for_dead(configuration: Configuration) -> FakeDecoder:
        if not lines and len(study.records()) == 1:
            study.optuna.tell(0, state=optuna.trial.TrialState.FAIL)
        return fake_decoder(configuration)

    runner(study, 2, taken_for_dead, lines).run()
    assert lines[0].startswith("trial 0 gave no sign of life")
    assert [record.state for record in study.records()][:1] == ["fail"]
    assert len(measured(study.records())) == 2


def test_failures_in_a_row_end_the_sweep(tmp_path: Path) -> None:
    study = open_study(tmp_path)

    def failing(configuration: Configuration) -> FakeDecoder:
        return FakeDecoder("trial", fail=lambda _: True)

    with pytest.raises(ValueError, match=r"3 trials in a row .* planted failure\. See to that"):
        runner(study, 10, failing).run()
    assert [record.state for record in study.records()] == ["fail"] * 3


def test_grid_is_measured_and_nothing_else(tmp_path: Path) -> None:
    study, lines = open_study(tmp_path, "grid"), list[str]()
    grid = SPACE.grid([1, 3], [1, 2], [4, 8])
    sweep = runner(study, 100, lines=lines)
    enqueue(study, [("grid", point) for point in grid])
    sweep.run()
    assert {record.configuration for record in study.records()} == set(grid)
    assert len(study.records()) == len(grid)
    assert "grid" in lines[-1]


def test_gaussian_process_measures_in_full(tmp_path: Path) -> None:
    study = open_study(tmp_path, "gp")
    sweep = runner(study, 6)
    enqueue(study, SPACE.known().items())
    sweep.run()
    assert all(record.state == "complete" for record in study.records())


def test_timeout_ends_between_trials(tmp_path: Path) -> None:
    study, lines = open_study(tmp_path), list[str]()
    runner(study, 10, lines=lines, timeout=0.0).run()
    assert study.records() == []
    assert "the same command goes on" in lines[-1]


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42 s"), (600, "10 min"), (3900, "1 h 05 min")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
