"""One trial: a configuration against vanilla, interleaved prompt by prompt, stopped early when it loses."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eagle3.decoding.generation import Decoder
from eagle3.measure.protocol import VANILLA, measure, schedule, warm_up
from eagle3.measure.records import Cell, CellKey
from eagle3.measure.rendering import Prompt, Renderer
from eagle3.measure.settings import EvaluationSettings
from eagle3.tuning.early_stop import compare, is_losing
from eagle3.tuning.measurement import Measurement, measurement_from_cells

TRIAL = "trial"
# A trial's shapes are warmed up by its first rounds, not by whole answers.
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """What every trial of a study decodes: prompts of the tuning split at one temperature."""

    prompts: Sequence[Prompt]
    renderer: Renderer
    settings: EvaluationSettings


@dataclass(frozen=True)
class Incumbent:
    """The best configuration so far: what it is called, and its speedup by prompt."""

    name: str
    speedups: Mapping[str, float]


@dataclass(frozen=True)
class TrialResult:
    """`stopped` says why a trial ended early; None for one that was measured in full. Times in seconds."""

    measurement: Measurement
    stopped: str | None
    foreign_cpu: float  # share of the machine's CPU time that other processes used, 0 to 1
    seconds: float


def run_trial(
    vanilla: Decoder,
    decoder: Decoder,
    workload: Workload,
    number: int,
    *,
    incumbent: Incumbent | None = None,
    level: float = 0.0,
) -> TrialResult:
    """Measure a configuration on all prompts, or until it is losing to the incumbent.

    Args:
        vanilla: decoded beside the configuration, so that both see the same machine.
        decoder: the configuration.
        workload: what to decode.
        number: seeds the order of prompts and methods.
        incumbent: what to lose to; None measures in full.
        level: see `early_stop.is_losing`.
    """
    began = time.perf_counter()
    settings = _settings_of(workload.settings, number)
    decoders = {VANILLA: vanilla, TRIAL: decoder}
    warm(decoder, workload)
    blocks = schedule(workload.prompts, replace(settings, seed=_seed(settings.seed, number)))
    cells: dict[CellKey, Cell] = {}
    measurement, stopped = Measurement(), None
    for done, block in enumerate(blocks, start=1):
        for record in measure(decoders, [block], workload.renderer, settings, cells):
            assert isinstance(record, Cell), "a trial's failures pass through"
            cells[record.key] = record
        measurement = measurement_from_cells(cells.values(), TRIAL)
        if incumbent is None or done == len(blocks):
            continue
        comparison = compare(measurement.speedups(), incumbent.speedups)
        if is_losing(comparison, len(blocks), level):
            stopped = (
                f"slower than {incumbent.name} on {comparison.lost} of {comparison.prompts} prompts "
                f"(p = {comparison.p:.2g})"
            )
            break
    if not measurement.prompts:
        raise ValueError(
            "no prompt was answered with more than one token, so that there is no decoding to time: "
            "raise sweep.max_new_tokens or choose other sweep.tasks"
        )
    foreign = sum(cell.foreign_cpu for cell in cells.values()) / len(cells)
    return TrialResult(measurement, stopped, foreign, time.perf_counter() - began)


def warm(decoder: Decoder, workload: Workload) -> None:
    """Run a decoder untimed, so that its first shapes cost nothing later."""
    settings = workload.settings
    short = replace(settings, max_new_tokens=min(_WARM_UP_TOKENS, settings.max_new_tokens))
    warm_up({TRIAL: decoder}, workload.prompts, workload.renderer, short)


def _settings_of(settings: EvaluationSettings, number: int) -> EvaluationSettings:
    """Settings whose seed gives the trial its own order; sampled answers keep the study's seed."""
    if any(settings.temperatures):
        return settings
    return replace(settings, seed=_seed(settings.seed, number))


def _seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
