"""A trial measures vanilla beside the configuration, on the same prompts, and stops when it loses."""

from eagle3.measure.protocol import schedule
from eagle3.tuning.space import Configuration
from eagle3.tuning.trial import Incumbent, run_trial
from tests.tuning.fakes import fake_decoder, vanilla, workload

GOOD = Configuration("eagle3", 3, 1, 4, "bfloat16", 0)
BAD = Configuration("eagle3", 5, 4, 16, "bfloat16", 0)


def test_every_prompt_is_measured_with_both() -> None:
    baseline, decoder, work = vanilla(), fake_decoder(GOOD), workload()
    result = run_trial(baseline, decoder, work, 3)
    assert result.stopped is None
    assert set(result.measurement.prompts) == {f"task/{prompt.id}" for prompt in work.prompts}
    assert 1.9 < result.measurement.speedup() < 2.1
    assert result.measurement.different_outputs == 0
    assert len(baseline.calls) == 10
    assert len(decoder.calls) == 12  # the trial's own two warm-ups are not timed


def test_loser_is_stopped_with_the_reason() -> None:
    best = run_trial(vanilla(), fake_decoder(GOOD), workload(), 1)
    incumbent = Incumbent("3/1/4", best.measurement.speedups())
    result = run_trial(vanilla(), fake_decoder(BAD), workload(), 2, incumbent=incumbent, level=0.1)
    assert result.stopped is not None
    assert "slower than 3/1/4 on 6 of 6 prompts" in result.stopped
    assert len(result.measurement.prompts) == 6


def test_trials_have_their_own_order() -> None:
    """An order shared by all trials would favour whatever suits it."""
    orders = []
    for number in (1, 2):
        decoder = fake_decoder(GOOD)
        run_trial(vanilla(), decoder, workload(), number)
        orders.append(decoder.calls[2:])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(schedule(workload().prompts, workload().settings)) == 10
