"""A server process: ready or said why not, and gone at the end with all that it started."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from eagle3.serving.server import ServerError, check_port, ended_by_signals, free_port, launch

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
    with launch(words(port, 1.0), HOST, port, log) as server:
        assert requests.get(f"{server.url}/health", timeout=5).status_code == 200
        child = child_of(log)
        assert child is not None
    assert gone(child)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)


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


# Keeps a server that ignores SIGTERM, and says where its child is.
KEEPER = """
import sys, time
from pathlib import Path
from eagle3.serving.server import launch
with launch(sys.argv[3:], "127.0.0.1", int(sys.argv[1]), Path(sys.argv[2])):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_second_interrupt_while_the_server_has_its_grace_leaves_nothing(tmp_path: Path) -> None:
    port, log = free_port(HOST), tmp_path / "server.log"
    command = [sys.executable, "-c", KEEPER, str(port), str(log), *words(port, deaf="deaf")]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"ready\n"
    child = child_of(log)
    assert child is not None
    server = child.parent()
    while keeper.poll() is None:
        keeper.send_signal(signal.SIGINT)
        time.sleep(1)
    assert gone(child)
    assert gone(server)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    port, log = free_port(HOST), tmp_path / "server.log"
    command = [sys.executable, "-c", KEEPER, str(port), str(log), *words(port)]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"ready\n"
    child = child_of(log)
    assert child is not None
    server = child.parent()
    keeper.kill()
    keeper.wait()
    try:
        while not gone(server):
            time.sleep(0.1)
    finally:
        child.kill()  # a real engine ends its own


def test_signals_end_the_process_in_order_while_servers_are_kept() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as ended, ended_by_signals():
            signal.raise_signal(number)
            time.sleep(5)
        assert ended.value.code == 128 + number
        assert signal.getsignal(signal.SIGTERM) == before
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_server_that_dies_later_is_explained_with_its_log(tmp_path: Path) -> None:
    port, log = free_port(HOST), tmp_path / "server.log"
    with launch(words(port), HOST, port, log) as server:
        assert "the server still runs: " in str(server.explain(ServerError("status 503")))
        child = child_of(log)
        assert child is not None
        server.process.kill()
        child.kill()  # in a session of its own, which nobody finds when its parent has died
        message = str(server.explain(ServerError("broke an answer off")))
        assert re.match(r"broke an answer off; the server died, killed by SIGKILL: ", message)
        assert f"the end of {log}:\nchild" in message


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
        pytest.raises(ValueError, match="nowhere/python does not exist, or cannot be run"),
        launch(["nowhere/python"], HOST, free_port(HOST), log),
    ):
        pass
    assert not log.exists()


def test_a_host_that_is_not_this_machines_is_said() -> None:
    for call in (lambda: check_port("192.0.2.1", 0), lambda: free_port("nowhere.invalid")):
        with pytest.raises(ValueError, match="a server cannot listen there"):
            call()


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
