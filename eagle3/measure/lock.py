"""One timing worker a machine: two at once would measure each other."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

# One for the whole machine, whatever the project's folder.
TIMING_LOCK = Path(tempfile.gettempdir()) / "eagle3-timing.lock"


@contextmanager
def timing_lock(path: Path | None = None) -> Iterator[None]:
    """Hold the machine's one place for a timing worker. Raises ValueError where another one has it."""
    path = path or TIMING_LOCK
    lock = FileLock(path, timeout=0, mode=0o666)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another evaluation or sweep is timing on this machine (it holds {path}): wait for it or stop "
            "it; two at once would measure each other"
        ) from None
    try:
        yield
    finally:
        lock.release()
