"""Configurations whose times are known, so that the right choice is."""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import optuna

from eagle3.measure.protocol import VANILLA
from eagle3.measure.settings import EvaluationSettings
from eagle3.tuning.measurement import Measurement, PromptTimes, Rounds
from eagle3.tuning.runner import Plan, Runner
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.study import Record, Study
from eagle3.tuning.trial import Workload
from tests.measure.fakes import FakeDecoder, fake_renderer, prompts

SPACE = Space(("eagle3",), 5, 4, 16, ("bfloat16",), (0,))
IDENTITY: dict[str, Any] = {"machine": {"cpu": "A", "cores": 2}, "drafts": {"eagle3": "abc"}}
# A prompt's answer never ends early, so that every prompt has decoding to time.
TOKENS = 9


def true_speedup(configuration: Configuration) -> float:
    """Highest, 2.0, for the chain of 3; every other is slower by at least 5 %."""
    distance = float(abs(configuration.num_steps - 3) + (configuration.topk - 1))
    distance += 0.02 * (configuration.num_draft_tokens - configuration.num_steps - 1)
    return 2.0 / (1.0 + 0.1 * distance)


def workload(count: int = 10) -> Workload:
    """Prompts of one task, greedy."""
    return Workload(
        prompts(count),
        fake_renderer,
        EvaluationSettings(max_new_tokens=TOKENS, dtype="float32", repeats=1, seed=5),
    )


def fake_decoder(configuration: Configuration) -> FakeDecoder:
    """A decoder as fast as `true_speedup` says, drafting in rounds of two tokens."""
    return FakeDecoder("trial", token_seconds=1.0 / true_speedup(configuration), round_tokens=2)


def vanilla() -> FakeDecoder:
    """One second a token."""
    return FakeDecoder(VANILLA)


@cache
def empty_database() -> Path:
    """An empty storage, made once a process: its tables take seconds."""
    path = Path(tempfile.mkdtemp()) / "empty.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    return path


def open_study(folder: Path, sampler: str = "tpe", space: Space = SPACE, **changes: Any) -> Study:
    """The study of a folder, made or resumed."""
    if not (folder / "sweep.db").exists():
        shutil.copy(empty_database(), folder / "sweep.db")
    return Study.open("tree", f"sqlite:///{folder / 'sweep.db'}", space, IDENTITY | changes, sampler, 1)


def runner(
    study: Study,
    trials: int,
    decoder_of: Callable[[Configuration], FakeDecoder] = fake_decoder,
    lines: list[str] | None = None,
    ended: list[Record] | None = None,
    **plan: Any,
) -> Runner:
    """A runner over the fake workload; its lines of progress go to `lines`, trials that ended to `ended`."""
    values: dict[str, Any] = {"timeout": None, "early_stop": 0.1, "seed": 1, **plan}
    say = (lines if lines is not None else []).append
    on_trial = (ended if ended is not None else []).append
    plan_ = Plan(trials, **values)
    return Runner(study, workload(), vanilla(), decoder_of, plan_, say=say, on_trial=on_trial)


def measurement(speedups: list[float], rounds: Rounds | None = None, repeats: int = 1) -> Measurement:
    """Prompts with these speedups: vanilla takes 10 seconds for 10 tokens of each."""
    times = {
        f"task/{index}": PromptTimes((10.0,) * repeats, (10.0 / speedup,) * repeats, 10, 10, True)
        for index, speedup in enumerate(speedups)
    }
    return Measurement(times, rounds or Rounds())
