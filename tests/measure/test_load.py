"""Other processes' work must be seen, and this process's own must not be taken for it."""

import math
import subprocess
import sys
import time

import pytest

from eagle3.measure.load import ForeignCpu, LoadSnapshot, foreign_share


@pytest.mark.parametrize(
    ("wall", "busy", "own", "share"),
    [
        (10.0, 10.0, 10.0, 0.0),  # all of the busy time is this process's
        (10.0, 10.0, 0.0, 0.5),  # one of two cores is another's
        (10.0, 9.9, 10.0, 0.0),  # clock ticks: never negative
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_foreign_share(wall: float, busy: float, own: float, share: float) -> None:
    assert foreign_share(wall, busy, own, cores=2) == pytest.approx(share)


def test_meter_is_a_share_and_starts_over_at_each_reading() -> None:
    meter = ForeignCpu()
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        math.sqrt(2.0)
    assert 0.0 <= meter.share() <= 1.0
    assert 0.0 <= meter.share() <= 1.0


def test_a_child_that_runs_is_no_foreign_process() -> None:
    """Servers are children, and poll: they must not be taken for other work."""
    burn = "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)"
    before = ForeignCpu._read()[2]
    with subprocess.Popen([sys.executable, "-c", burn + "\ninput()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        own = ForeignCpu._read()[2] - before
        child.communicate(b"\n")
    assert own > 0.3


def test_snapshot_is_json_ready() -> None:
    snapshot = LoadSnapshot.take().as_dict()
    assert isinstance(snapshot["load_average"], list)
    assert len(snapshot["load_average"]) == 3
