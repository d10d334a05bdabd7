"""A sweep's study: trials in an Optuna storage, bound to what was measured, resumed after any kill."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from eagle3.tuning.heartbeat import GRACE, beating, fail_silent_trials, machine_name, open_storage, quietly
from eagle3.tuning.identity import refusal
from eagle3.tuning.measurement import Measurement
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.trial import TrialResult

SAMPLERS = ("tpe", "gp", "grid")
# The step of a stopped trial's estimate, behind the steps of all prompts: samplers rank stopped trials by it.
_ESTIMATE_STEP = 1_000_000


@dataclass(frozen=True)
class Record:
    """One trial. `source` says who chose it; `reason` why it ended as it did; times in seconds.

    A trial of state "known" measured nothing, because its configuration was known well enough. `known` is
    everything measured of its configuration up to and with this trial.
    """

    number: int
    state: str  # complete, pruned, known, fail or running
    configuration: Configuration | None
    measurement: Measurement | None
    known: Measurement | None
    source: str
    reason: str
    seconds: float | None
    foreign_cpu: float | None


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler by name. The grid is enqueued, so that nothing is left to sample for it."""
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed, deterministic_objective=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


@dataclass(frozen=True)
class Asked:
    """A trial to run now."""

    trial: optuna.Trial
    configuration: Configuration
    source: str

    @property
    def number(self) -> int:
        return self.trial.number


@dataclass(frozen=True)
class Study:
    """Asks for configurations, and keeps what was measured of them."""

    optuna: optuna.Study
    space: Space
    sampler: str
    storage: RDBStorage
    silent: list[FrozenTrial] = field(default_factory=list)  # failed for giving no sign of life

    @classmethod
    def open(
        cls, name: str, storage: str, space: Space, identity: Mapping[str, Any], sampler: str, seed: int
    ) -> "Study":
        """Create or resume the study.

        Args:
            name: of the study in its storage.
            storage: an SQLAlchemy URL.
            space: what may be chosen.
            identity: what the measurements depend on: space, workload, draft, machine, code. JSON-like.
            sampler: "tpe", "gp" or "grid".
            seed: of the sampler, together with the number of trials so far: the same seed again would repeat
                the first trials.

        Raises:
            ValueError: if the study was made for another identity, naming what differs and the way out.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        silent: list[FrozenTrial] = []
        opened = open_storage(storage, silent)
        study = optuna.create_study(
            study_name=name, storage=opened, direction="maximize", load_if_exists=True
        )
        opened_study = cls(study, space, sampler, opened, silent)
        if reason := opened_study.refusal(identity):
            raise ValueError(reason)
        if "identity" not in study.user_attrs:
            study.set_user_attr("identity", dict(identity))
        study.sampler = make_sampler(sampler, seed + len(study.get_trials(deepcopy=False)))
        return opened_study

    @classmethod
    def read(cls, name: str, storage: str, space: Space) -> "Study | None":
        """An existing study, whatever it was measured with, to read; None where there is none."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = Path(storage.removeprefix("sqlite:///"))
        if storage.startswith("sqlite:///") and not path.is_file():
            return None  # connecting would make the file
        silent: list[FrozenTrial] = []
        opened = open_storage(storage, silent)
        try:
            study = optuna.load_study(study_name=name, storage=opened)
        except KeyError:
            return None
        return cls(study, space, SAMPLERS[0], opened, silent)

    def refusal(self, identity: Mapping[str, Any]) -> str | None:
        """Why `open` would refuse this study with another identity; None where it would not."""
        before = self.optuna.user_attrs.get("identity")
        name, url = self.optuna.study_name, self.storage.url
        return None if before is None else refusal(name, url, before, identity)

    @property
    def stops_early(self) -> bool:
        """Whether trials may be stopped. A Gaussian process learns nothing from one that was."""
        return self.sampler != "gp"

    @property
    def waiting(self) -> int:
        """Trials in the queue."""
        return len(self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def revive(self) -> list[int]:
        """Tell dead trials that they failed, and queue them again; returns their numbers.

        To be called while holding the machine's timing lock, and between trials: then a running trial of this
        machine was killed. Of other machines' trials those are dead that give no sign of life.
        """
        dead = [
            trial
            for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.user_attrs.get("machine") == machine_name() or _never_began(trial)
        ]
        for trial in dead:
            self.optuna.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        fail_silent_trials(self.optuna)
        dead += self.silent
        self.silent.clear()
        for trial in dead:
            if "configuration" in trial.user_attrs:
                again = Configuration(**trial.user_attrs["configuration"])
                self.enqueue(again, f"again, trial {trial.number} was killed", even_if_known=True)
            elif fixed := trial.system_attrs.get("fixed_params"):  # killed before it knew its configuration
                source = trial.user_attrs.get("source", self.sampler)
                self.optuna.enqueue_trial(fixed, user_attrs={"source": source})
        return [trial.number for trial in dead]

    def without_result(self, records: list[Record]) -> set[Configuration]:
        """What of the records only ever failed, as where a server did not start, and is not queued again."""
        waiting = self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        queued = [trial.system_attrs.get("fixed_params") for trial in waiting]
        others = {record.configuration for record in records if record.state != "fail"}
        return {
            record.configuration
            for record in records
            if record.configuration is not None
            and record.configuration not in others
            and self.space.parameters(record.configuration, self._fills_always) not in queued
        }

    def enqueue(self, configuration: Configuration, source: str, even_if_known: bool = False) -> None:
        """Have the configuration tried next; one that was tried or is queued only if wanted."""
        self.optuna.enqueue_trial(
            self.space.parameters(configuration, self._fills_always),
            user_attrs={"source": source},
            skip_if_exists=not even_if_known,
        )

    def ask(self) -> Asked:
        """The next trial, from the queue or the sampler."""
        with quietly():
            trial = self.optuna.ask()
        trial.set_user_attr("machine", machine_name())
        configuration = self.space.suggest(trial, self._fills_always)
        trial.set_user_attr("configuration", configuration.as_dict())
        return Asked(trial, configuration, trial.user_attrs.get("source", self.sampler))

    def beating(self, asked: Asked) -> AbstractContextManager[None]:
        """To be entered while the trial is measured: other machines see that it lives."""
        study_id = self.storage.get_study_id_from_name(self.optuna.study_name)
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, asked.number)
        return beating(self.storage, trial_id)

    def tell(self, asked: Asked, result: TrialResult, known: Measurement) -> None:
        """Record a measured trial; its value is the estimate from all that is known of its configuration.

        Raises:
            UpdateFinishedTrialError: if another machine took the trial for dead and failed it meanwhile.
        """
        trial = asked.trial
        trial.set_user_attr("measurement", result.measurement.as_dict())
        trial.set_user_attr("seconds", result.seconds)
        trial.set_user_attr("foreign_cpu", result.foreign_cpu)
        if result.stopped is None:
            self.optuna.tell(trial, known.speedup())
        else:
            trial.set_user_attr("reason", result.stopped)
            trial.report(known.speedup(), _ESTIMATE_STEP)
            self.optuna.tell(trial, state=TrialState.PRUNED)

    def tell_known(self, asked: Asked, known: Measurement, reason: str) -> None:
        """Answer a trial from what is known, without measuring."""
        asked.trial.set_user_attr("reason", reason)
        self.optuna.tell(asked.trial, known.speedup())

    def tell_failed(self, asked: Asked, reason: str) -> None:
        """Record a trial that ended without a result."""
        asked.trial.set_user_attr("reason", reason)
        self.optuna.tell(asked.trial, state=TrialState.FAIL)

    def records(self) -> list[Record]:
        """All trials that began, by number."""
        known: dict[Configuration, Measurement] = {}
        records = []
        for trial in self.optuna.get_trials(deepcopy=False):
            if trial.state == TrialState.WAITING:
                continue
            values = trial.user_attrs
            configuration = Configuration(**values["configuration"]) if "configuration" in values else None
            own = Measurement.from_dict(values["measurement"]) if "measurement" in values else None
            if configuration is not None and own is not None:
                known[configuration] = known.get(configuration, Measurement()) + own
            records.append(
                Record(
                    number=trial.number,
                    state="known"
                    if trial.state == TrialState.COMPLETE and own is None
                    else trial.state.name.lower(),
                    configuration=configuration,
                    measurement=own,
                    known=known.get(configuration) if configuration is not None else None,
                    source=values.get("source", self.sampler),
                    # Nobody is left to give a reason where a trial was killed.
                    reason=values.get("reason", "killed" if trial.state == TrialState.FAIL else ""),
                    seconds=values.get("seconds"),
                    foreign_cpu=values.get("foreign_cpu"),
                )
            )
        return records

    @property
    def _fills_always(self) -> bool:
        """A Gaussian process models the parameters that all trials have."""
        return self.sampler == "gp"


def _never_began(trial: FrozenTrial) -> bool:
    """Whether a trial was killed, long ago, between being asked for and being some machine's."""
    began = trial.datetime_start
    return (
        "machine" not in trial.user_attrs
        and began is not None
        and (datetime.now() - began).total_seconds() > GRACE
    )


def measured(records: list[Record]) -> list[Record]:
    """The trials that measured something, in full or up to an early stop."""
    return [record for record in records if record.measurement is not None]


def known_configurations(records: list[Record]) -> dict[Configuration, Measurement]:
    """All that is known of every configuration, stopped trials included."""
    return {
        record.configuration: record.known
        for record in records
        if record.configuration is not None and record.known is not None
    }


def ranked(records: list[Record]) -> list[tuple[Configuration, Measurement]]:
    """Configurations measured in full at least once, the fastest first."""
    full = {record.configuration for record in measured(records) if record.state == "complete"}
    known = known_configurations(records)
    return sorted(
        ((configuration, known[configuration]) for configuration in full if configuration is not None),
        key=lambda item: -item[1].speedup(),
    )
