"""A server process: ready or said why not, and gone at the end with all that it started."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from eagle3.serving.server import ServerError, check_port, free_port, launch

HOST = "127.0.0.1"
# Gets ready after a moment, and has a child of its own, as engines do; deaf to SIGTERM where it is told so.
SERVER = """
import http.server, signal, subprocess, sys, time
port, ready, deaf = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(ready)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def words(port: int, ready: float = 0.0, deaf: str = "") -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), str(ready), deaf]


def child_of(log: Path) -> psutil.Process | None:
    number = int(log.read_text().split("child ")[1].split()[0])
    return psutil.Process(number) if psutil.pid_exists(number) else None


def gone(process: psutil.Process | None) -> bool:
    return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_server_is_ready_when_it_is_yielded_and_gone_with_its_children_afterwards(tmp_path: Path) -> None:
    port, log = free_port(HOST), tmp_path / "logs" / "server.log"
    with launch(words(port, 1.0), HOST, port, log) as url:
        assert requests.get(f"{url}/health", timeout=5).status_code == 200
        child = child_of(log)
        assert child is not None
    assert gone(child)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=5)


def test_a_server_is_ended_when_its_user_fails(tmp_path: Path) -> None:
    port, log = free_port(HOST), tmp_path / "server.log"
    with pytest.raises(KeyboardInterrupt), launch(words(port), HOST, port, log):
        raise KeyboardInterrupt
    assert gone(child_of(log))


def test_a_server_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.serving.server._GRACE", 0.5)
    port, log = free_port(HOST), tmp_path / "server.log"
    with launch(words(port, deaf="deaf"), HOST, port, log):
        pass
    assert gone(child_of(log))


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    port = free_port(HOST)
    script = (
        "import sys; [print('line', i, flush=True) for i in range(50)]; sys.exit('no memory for the model')"
    )
    with (
        pytest.raises(ServerError, match=r"(?s)exit status 1.*line 49\nno memory for the model") as error,
        launch([sys.executable, "-c", script], HOST, port, tmp_path / "server.log"),
    ):
        pass
    assert "line 3\n" not in str(error.value)


def test_a_server_that_is_never_ready_is_ended_in_time(tmp_path: Path) -> None:
    port, log = free_port(HOST), tmp_path / "server.log"
    began = time.monotonic()
    with (
        pytest.raises(ServerError, match=r"not ready after 2 s \(serving.start_timeout\)"),
        launch(words(port, 600.0), HOST, port, log, timeout=2.0),
    ):
        pass
    assert time.monotonic() - began < 60
    assert gone(child_of(log))


def test_a_taken_port_and_a_missing_program_are_said_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .* is taken .*serving.port"):
            check_port(HOST, port)
        with pytest.raises(ValueError, match="is taken"), launch(words(port), HOST, port, log):
            pass
    with (
        pytest.raises(ValueError, match=r"nowhere/python does not exist: .*serving.<engine>.python"),
        launch(["nowhere/python"], HOST, free_port(HOST), log),
    ):
        pass
    assert not log.exists()


def test_variables_reach_the_server(tmp_path: Path) -> None:
    port = free_port(HOST)
    script = "import os, sys; sys.exit('value ' + os.environ['ENGINE_OPTION'])"
    with (
        pytest.raises(ServerError, match="value 7"),
        launch(
            [sys.executable, "-c", script],
            HOST,
            port,
            tmp_path / "server.log",
            environment={"ENGINE_OPTION": "7"},
        ),
    ):
        pass
