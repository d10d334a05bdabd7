"""The sweep's loop: known configurations first, then the sampler's and the cost model's."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from optuna.exceptions import UpdateFinishedTrialError

from eagle3.decoding.generation import Decoder
from eagle3.measure.statistics import Interval
from eagle3.tuning.measurement import Measurement
from eagle3.tuning.predictor import Predictor
from eagle3.tuning.space import Configuration
from eagle3.tuning.study import Asked, Record, Study, known_configurations, measured, ranked
from eagle3.tuning.trial import Incumbent, TrialResult, Workload, run_trial, warm

# Measurements of one configuration beyond which its estimate is not tightened further.
MOST_REPEATS = 5
# Every so many trials one is the cost model's, after it has this many configurations to learn from.
_SUGGEST_EVERY = 5
_FIT_FROM = 6
# So many failures one after the other are no property of the configurations.
_MOST_FAILURES = 3


@dataclass(frozen=True)
class Plan:
    """Measured trials wanted in the study, seconds after which no trial begins, level of the early stop."""

    trials: int
    timeout: float | None
    early_stop: float
    seed: int


class Runner:
    """Runs trials of a study with the decoders it is given."""

    def __init__(
        self,
        study: Study,
        workload: Workload,
        vanilla: Decoder,
        decoder_of: Callable[[Configuration], Decoder],
        plan: Plan,
        *,
        say: Callable[[str], None] = print,
        on_trial: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """
        Args:
            decoder_of: makes the decoder of a configuration.
            say: takes lines of progress.
            on_trial: takes every trial that ended, also one that had nothing to measure or was killed.
        """
        self.study, self.workload, self.plan = study, workload, plan
        self.vanilla, self.decoder_of = vanilla, decoder_of
        self.say, self.on_trial = say, on_trial
        self._space_size = sum(1 for _ in study.space.configurations())

    def run(self) -> None:
        """Run until the plan is fulfilled. A KeyboardInterrupt passes through; its trial is run again later.

        Raises:
            ValueError: after several failed trials in a row, from the last one's error.
        """
        began, failures = time.monotonic(), 0
        warm(self.vanilla, self.workload)
        while True:
            for number in self.study.revive():
                self.say(f"trial {number} was killed; it is run again")
                self._report(number, time.monotonic() - began)
            records = self.study.records()
            if why := self._finished(records, time.monotonic() - began):
                self.say(why)
                return
            self._suggest(records)
            asked = self.study.ask()
            known = known_configurations(records).get(asked.configuration)
            if known is not None and (reason := self._known_enough(known, records)):
                self.study.tell_known(asked, known, reason)
                self._report(asked.number, time.monotonic() - began)
                self._replace(records, asked.number)
                continue
            try:
                result = self._measure(asked, records)
            except KeyboardInterrupt:
                self.study.tell_failed(asked, "interrupted")
                self.study.enqueue(
                    asked.configuration, f"again, trial {asked.number} was interrupted", even_if_known=True
                )
                self._report(asked.number, time.monotonic() - began)
                raise
            except Exception as error:
                failures += 1
                self.study.tell_failed(asked, f"{type(error).__name__}: {error}")
                self.say(f"trial {asked.number} {self._label(asked)} failed: {error}")
                if failures == _MOST_FAILURES:
                    raise ValueError(
                        f"{failures} trials in a row failed, the last with {type(error).__name__}: {error}. "
                        "See to that; the same command goes on"
                    ) from error
            else:
                failures = 0
                try:
                    self.study.tell(asked, result, (known or Measurement()) + result.measurement)
                except UpdateFinishedTrialError:
                    self.say(
                        f"trial {asked.number} gave no sign of life for long, and another machine has it run "
                        "again: its measurement is left out"
                    )
                    continue
            self._report(asked.number, time.monotonic() - began)

    def _measure(self, asked: Asked, records: list[Record]) -> TrialResult:
        best = ranked(records)
        incumbent = None
        if best and self.study.stops_early and best[0][0] != asked.configuration:
            incumbent = Incumbent(self.study.space.label(best[0][0]), best[0][1].speedups())
        with self.study.beating(asked):
            began = time.perf_counter()
            decoder = self.decoder_of(asked.configuration)
            starting = time.perf_counter() - began  # a server takes minutes
            result = run_trial(
                self.vanilla,
                decoder,
                self.workload,
                asked.number,
                incumbent=incumbent,
                level=self.plan.early_stop,
            )
        return replace(result, seconds=starting + result.seconds)

    def _finished(self, records: list[Record], seconds: float) -> str | None:
        """Why the sweep ends now, or None."""
        done = len(measured(records))
        if done >= self.plan.trials:
            return f"{done} trials are measured"
        if self.plan.timeout is not None and seconds >= self.plan.timeout:
            return f"time is up after {done} of {self.plan.trials} trials; the same command goes on"
        known = known_configurations(records)
        failed = self.study.without_result(records)
        all_ = "" if failed else "all "
        but = f"; {len(failed)} failed, and the same command tries known ones again" if failed else ""
        if self.study.sampler == "grid" and not self.study.waiting:
            return f"{all_}{len(known)} points of the grid are measured{but}"
        # What failed again and again is no reason to go on measuring the rest.
        everything = bool(known) and len(known) + len(failed) == self._space_size
        if everything and all(self._known_enough(item, records) for item in known.values()):
            return f"{all_}{len(known)} configurations are known as well as measuring again can tell{but}"
        return None

    def _known_enough(self, known: Measurement, records: list[Record]) -> str | None:
        """Why measuring this configuration again would change nothing, or None where it would."""
        if known.repeats >= MOST_REPEATS:
            return f"measured {known.repeats} times before"
        best = ranked(records)
        if best and _high(known.interval(self.plan.seed)) < _low(best[0][1].interval(self.plan.seed)):
            return f"measured before, and slower than {self.study.space.label(best[0][0])}"
        return None

    def _suggest(self, records: list[Record]) -> None:
        """Queue the cost model's favourite now and then."""
        done = len(measured(records))
        if self.study.sampler == "grid" or self.study.waiting or done % _SUGGEST_EVERY:
            return
        if (favourite := self._favourite(records)) is not None:
            self.study.enqueue(favourite, "cost model")

    def _replace(self, records: list[Record], number: int) -> None:
        """In place of a trial that had nothing to measure, queue one that has."""
        if self.study.sampler == "grid" or self.study.waiting:
            return
        if (favourite := self._favourite(records)) is not None:
            self.study.enqueue(favourite, "cost model")
        elif unknown := self._unknown(records):
            self.study.enqueue(random.Random(f"{self.plan.seed}/{number}").choice(unknown), "random")
        else:
            known = known_configurations(records).items()
            open_ = [item for item in known if not self._known_enough(item[1], records)]
            if open_:
                best = max(open_, key=lambda item: item[1].speedup())
                self.study.enqueue(best[0], "tighten", even_if_known=True)

    def _unknown(self, records: list[Record]) -> list[Configuration]:
        """What was never tried. What failed is not among them: it would be queued for ever."""
        tried = {record.configuration for record in records}
        return [item for item in self.study.space.configurations() if item not in tried]

    def _favourite(self, records: list[Record]) -> Configuration | None:
        """The configuration without a measurement that is predicted to be fastest, once that can be told."""
        if len(measured(records)) < _FIT_FROM:
            return None
        ranking = Predictor.fit(known_configurations(records)).ranked(self._unknown(records))
        return ranking[0][0] if ranking else None

    def _report(self, number: int, seconds: float) -> None:
        records = self.study.records()
        record = next(item for item in records if item.number == number)
        self.on_trial(record)
        if record.measurement is None:
            return
        self.say(progress_line(record, records, self.study, self.plan, seconds))

    def _label(self, asked: Asked) -> str:
        return self.study.space.label(asked.configuration)


def progress_line(record: Record, records: list[Record], study: Study, plan: Plan, seconds: float) -> str:
    """One line: which trial, its result or why it was stopped, the best so far, the time left."""
    done = len(measured(records))
    assert record.configuration is not None
    assert record.known is not None
    interval = record.known.interval(plan.seed)
    text = f"[{done}/{plan.trials}] {study.space.label(record.configuration):<8} {interval.estimate:.2f}x"
    if interval.low is not None and interval.high is not None:
        text += f" [{interval.low:.2f}, {interval.high:.2f}]"
    if record.known.tau is not None:
        text += f"  tau {record.known.tau:.2f}"
    if record.reason:
        text += f"  stopped: {record.reason}"
    best = ranked(records)
    if best:
        text += f"  | best {study.space.label(best[0][0])} {best[0][1].speedup():.2f}x"
    spent = [item.seconds for item in measured(records) if item.seconds is not None]
    left = (plan.trials - done) * sum(spent) / len(spent)
    if plan.timeout is not None:
        left = min(left, max(0.0, plan.timeout - seconds))
    return f"{text}  | {duration(left)} left"


def duration(seconds: float) -> str:
    """ "43 s", "12 min" or "1 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _low(interval: Interval) -> float:
    return interval.estimate if interval.low is None else interval.low


def _high(interval: Interval) -> float:
    return interval.estimate if interval.high is None else interval.high
