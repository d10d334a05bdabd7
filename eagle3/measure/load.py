"""How busy the machine is with other work: other processes' CPU time falsifies every timing."""

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

import psutil


@dataclass(frozen=True)
class LoadSnapshot:
    """Load of the machine at a moment: 1, 5 and 15 minute averages, memory available in GiB."""

    load_average: list[float]
    available_gib: float

    @classmethod
    def take(cls) -> "LoadSnapshot":
        one, five, fifteen = psutil.getloadavg()
        available = psutil.virtual_memory().available / 2**30
        return cls([round(one, 2), round(five, 2), round(fifteen, 2)], round(available, 1))

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class ForeignCpu:
    """Share of the machine's CPU time that other processes used since the object was made or last read."""

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self._before = self._read()

    def share(self) -> float:
        """0 to 1 of all cores; the clock ticks of 10 ms make it coarse over short spans."""
        wall, busy, own = self._read()
        wall_before, busy_before, own_before = self._before
        self._before = (wall, busy, own)
        return foreign_share(wall - wall_before, busy - busy_before, own - own_before, self._cores)

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Wall clock, busy CPU seconds of the whole machine, CPU seconds of this process and its children (of
        those that run, as servers do, and of those that have ended).
        """
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is part of user time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = os.times()
        return (
            time.monotonic(),
            total - idle,
            own.user + own.system + own.children_user + own.children_system + _running_children(),
        )


def _running_children() -> float:
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def foreign_share(wall: float, busy: float, own: float, cores: int) -> float:
    """(busy - own) / (wall * cores) in [0, 1]; all in seconds. 0 over an empty span."""
    if wall <= 0:
        return 0.0
    return min(1.0, max(0.0, (busy - own) / (wall * cores)))
