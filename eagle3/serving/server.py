"""A server process from start to end: it gets ready or says why not, and nothing of it is left."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
import requests

_POLL = 0.5  # seconds between two looks at a server that starts
_TELL = 15.0  # seconds between two lines of progress
_GRACE = 15.0  # seconds that a server has to end by itself
_LAST_WORDS = 2.0  # seconds in which a server that breaks an answer off may end
_LOG_LINES = 25  # of a server that died, in the error

# Linux alone can tell a process to end when the one that started it is killed; then it becomes the server.
_ENDED_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(ValueError):
    """A server that did not start, died or broke an answer off; the message says why."""


@dataclass(frozen=True)
class RunningServer:
    """A server that `launch` has started."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def explain(self, error: ServerError) -> ServerError:
        """The error with what became of the server, and the end of its log."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_LAST_WORDS)
        ended = self.process.returncode is not None
        state = f"the server died, {_ending(self.process)}" if ended else "the server still runs"
        return ServerError(
            f"{error}; {state}: {reason(self.log)}\nthe end of {self.log}:\n{last_lines(self.log)}"
        )


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Meanwhile SIGTERM and a closed terminal's SIGHUP end this process by SystemExit.

    By default they would end it at once, and leave the servers that it started. A signal that is ignored, as
    under nohup, stays so. Python lets only the main thread do this; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def launch(
    command: Sequence[str],
    host: str,
    port: int,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    say: Callable[[str], None] = print,
) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, yield it, and end it and its children in any case.

    On Linux it also ends when the thread that called this does, as a killed process's do.

    Args:
        command: the program and its options.
        log: takes the server's output.
        environment: variables beside this process's own.
        timeout: seconds to get ready.
        say: takes lines of progress.

    Raises:
        ValueError: before anything starts, if the program is missing or the port taken.
        ServerError: if it ends while starting, or is not ready in time.
    """
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"{command[0]} does not exist, or cannot be run")
    check_port(host, port)
    words = [program, *command[1:]]
    if sys.platform == "linux":
        words = [sys.executable, "-I", "-S", "-c", _ENDED_WITH_PARENT, str(os.getpid()), *words]
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://{host}:{port}"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the server in order
        )
        try:
            _wait(process, url, log, timeout, say)
            yield RunningServer(url, log, process)
        finally:
            _end(process)


def check_port(host: str, port: int) -> None:
    """Raises ValueError if something listens on the port, or the host is not this machine's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, host, port)


def free_port(host: str) -> int:
    """A port that nothing listens on now; ValueError as `check_port`."""
    with socket.socket() as probe:
        _bind(probe, host, 0)
        return int(probe.getsockname()[1])


def _bind(probe: socket.socket, host: str, port: int) -> None:
    try:
        probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is taken ({error.strerror}): end what listens there, or set "
                "serving.port to another one, or to 0 for a free one"
            ) from error
        raise ValueError(
            f"serving.host {host}, port {port}: a server cannot listen there ({error.strerror}); take "
            "127.0.0.1, or an address of this machine"
        ) from error


def last_lines(log: Path, count: int = _LOG_LINES) -> str:
    """The end of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-count:]) or "(it wrote nothing)"


def reason(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = last_lines(log, 200).splitlines()
    named = [line.strip() for line in lines if re.search(r"Error\b|\berror:", line)]
    return (named or lines)[-1][:300]


def _wait(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout: float, say: Callable[[str], None]
) -> None:
    began = told = time.monotonic()
    session = requests.Session()
    session.trust_env = False  # a proxy of the environment knows nothing of this machine's ports
    while True:
        if process.poll() is not None:
            raise ServerError(
                f"the server ended while starting, {_ending(process)}: {reason(log)}\nthe end of {log}:\n"
                f"{last_lines(log)}"
            )
        try:
            if session.get(f"{url}/health", timeout=5).status_code == requests.codes.ok:
                return
        except requests.RequestException:
            pass  # not listening yet
        now = time.monotonic()
        if now - began > timeout:
            raise ServerError(
                f"the server was not ready after {timeout:.0f} s (serving.start_timeout); the end of {log}:\n"
                f"{last_lines(log)}"
            )
        if now - told > _TELL:
            told = now
            say(f"  starting for {now - began:.0f} s: {last_lines(log, 1)[:120]}")
        time.sleep(_POLL)


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"with exit status {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and all that it started; what does not go by itself is killed.

    A second interrupt cuts the wait short, and nothing else.
    """
    family: list[psutil.Process] = []
    try:
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(process.pid)
            family = [server, *server.children(recursive=True)]
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        # Workers form the session's group; those that left it are found by descent.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        psutil.wait_procs(family, timeout=_GRACE)
