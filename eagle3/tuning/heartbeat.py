"""Signs of life of a running trial, by which other machines tell a killed trial from a slow one."""

import socket
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy.exc import ArgumentError

from eagle3.provenance import without_password

# Seconds between two signs of life, and without one after which a trial counts as killed. A restarted
# container has another name, and waits that long for the trial that it was killed in.
BEAT = 60
GRACE = 300


def machine_name() -> str:
    """This machine among those that share a study; the host name alone is often "localhost"."""
    return f"{socket.gethostname()} {uuid.getnode():012x}"


def open_storage(url: str, silent: list[FrozenTrial]) -> RDBStorage:
    """The storage of an SQLAlchemy URL; `fail_silent_trials` adds to `silent` what it failed.

    Raises:
        ValueError: if it is no such URL, or its driver is not installed.
    """
    try:
        with quietly():
            return RDBStorage(
                url,
                heartbeat_interval=BEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=lambda study, trial: silent.append(trial),
            )
    except (ArgumentError, ImportError) as error:
        raise ValueError(
            f"storage {without_password(url)} cannot be opened ({error}): give a database URL, such as "
            "sqlite:///runs/sweep.db or postgresql://user@host/name, and install its driver"
        ) from error


def fail_silent_trials(study: optuna.Study) -> None:
    """Fail the trials that gave no sign of life for `GRACE` seconds, by the database's clock."""
    with quietly():
        optuna.storages.fail_stale_trials(study)


@contextmanager
def beating(storage: RDBStorage, trial_id: int) -> Iterator[None]:
    """Give signs of life of the trial from a thread, as long as the block runs."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            with suppress(StorageInternalError):  # the database is away: the next sign may reach it
                storage.record_heartbeat(trial_id)
            if ended.wait(BEAT):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def quietly() -> Iterator[None]:
    """Without optuna's warnings that heartbeats are experimental, and meant for its own loop of trials."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ExperimentalWarning)
        warnings.filterwarnings("ignore", message="Heartbeat of storage", category=UserWarning)
        yield
