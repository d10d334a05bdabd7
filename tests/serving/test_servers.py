"""Servers as evaluation, sweep and experiments/serving.py own them, with an engine that is a few lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from eagle3 import paths
from eagle3.config import Settings, parse_settings
from eagle3.decoding.sampling import Sampling
from eagle3.models import formats
from eagle3.models.target import Target
from eagle3.parameters import merge, read_profile
from eagle3.provenance import write_yaml
from eagle3.serving.bench import ServedBench, speculation_of
from eagle3.serving.engines import Speculation
from eagle3.serving.server import ServerError, free_port
from eagle3.serving.servers import Servers
from tests.data.served import serving
from tests.serving.fake_engine import told, write_engine

ROOT = Path(__file__).parents[2]
LOGS = paths.RUNS / "serving"


def values(engine: Path | str, **changes: Any) -> dict[str, Any]:
    """params.yaml with that engine for SGLang."""
    serving = merge({"start_timeout": 60.0, "sglang": {"python": str(engine)}}, changes)
    return merge(read_profile("default", ROOT / "profiles"), {"serving": serving})


def settings(engine: Path | str, **changes: Any) -> Settings:
    return parse_settings(values(engine, **changes))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake engine, in a project that has a target and nothing else."""
    monkeypatch.chdir(tmp_path)
    paths.TARGET.mkdir(parents=True)
    (paths.TARGET / "config.json").write_text("{}")
    return write_engine(tmp_path)


def served_ports(names: Sequence[str]) -> list[int]:
    return [int(told(LOGS / f"sglang-{name}.log", "--port")) for name in names]


def test_a_port_that_was_given_back_is_used_again(engine: Path) -> None:
    """As a sweep does: vanilla, a trial, and then vanilla anew beside that trial."""
    port = free_port("127.0.0.1")
    with Servers(settings(engine, port=port), "sglang") as servers:
        for name in ("vanilla", "trial", "vanilla", "2/3/6"):
            servers.url(name, None)
        assert served_ports(["vanilla", "trial", "2-3-6"]) == [port, port + 1, port + 2]
        pids = [int(told(log, "pid")) for log in LOGS.glob("*.log")]
        servers.stop_all()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_server_that_dies_while_it_answers_shows_its_log(engine: Path, tiny_target: Target) -> None:
    with Servers(settings(engine), "sglang") as servers:
        served = ServedBench(tiny_target, Path("drafts"), "sglang", servers, {})
        decoder = served.vanilla()
        with pytest.raises(ServerError) as error:
            decoder.generate([1, 2], 4, Sampling())
    message = str(error.value)
    assert "the server died, with exit status 3: RuntimeError: out of memory" in message
    assert f"the end of {LOGS / 'sglang-vanilla.log'}:" in message


def test_a_new_comparison_ends_the_servers_of_the_last(engine: Path, tiny_target: Target) -> None:
    with Servers(settings(engine), "sglang") as servers:
        served = ServedBench(tiny_target, Path("drafts"), "sglang", servers, {})
        servers.url("trial", None)
        trial = int(told(LOGS / "sglang-trial.log", "pid"))
        served.vanilla()
        assert not psutil.pid_exists(trial)


def test_an_evaluation_is_told_how_the_servers_are_started(engine: Path, tiny_target: Target) -> None:
    """Other options are other times: a journal of the one is not gone on with under the other."""
    described = []
    for options in ({}, {"max-running-requests": 2}):
        with ExitStack() as stack:
            chosen = settings(engine, sglang={"options": options, "environment": {"KEY": "secret"}})
            described.append(ServedBench.start(chosen, "sglang", tiny_target, stack).describe())
    assert described[0] != described[1]
    assert described[1]["serving"]["options"]["max-running-requests"] == 2
    assert "secret" not in json.dumps(described)


def test_a_missing_target_is_said_before_anything_starts(engine: Path) -> None:
    (paths.TARGET / "config.json").unlink()
    with (
        Servers(settings(engine), "sglang") as servers,
        pytest.raises(ValueError, match=r"models/target holds no model: .*dvc repro target"),
    ):
        servers.url("vanilla", None)
    assert not list(LOGS.glob("*.log"))


def test_a_missing_engine_is_said_with_what_installs_it(engine: Path) -> None:
    with (
        Servers(settings("nowhere/bin/python"), "sglang") as servers,
        pytest.raises(ValueError, match=r"sglang\.python: nowhere/bin/python .*bin/pip install sglang"),
    ):
        servers.url("vanilla", None)


@pytest.mark.parametrize("name", ["trial", "eagle-tree"])
def test_urls_name_what_is_served(engine: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"serving\.sglang\.urls\.{name}: .* it can name vanilla, eagle"):
        Servers(settings(engine, sglang={"urls": {name: "http://127.0.0.1:9"}}), "sglang")


def test_a_server_that_runs_already_has_to_serve_what_is_asked(
    engine: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another tree, algorithm or dtype is an error; another path can be the same files."""
    drafted = Speculation("eagle3", Path("models/drafts/eagle3"), 2, 3, 6)
    right = {
        "model_path": "/elsewhere/models/target",
        "dtype": "float32",
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/elsewhere/eagle3",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 6,
        "enable_torch_compile": False,
    }
    with serving(tiny_target, "sglang") as running:
        urls = {"eagle3": running.url, "vanilla": running.url}
        with Servers(settings(engine, sglang={"urls": urls}), "sglang") as servers:
            running.info = right
            assert servers.url("eagle3", drafted) == running.url
            assert capsys.readouterr().out == ""
            with pytest.raises(ValueError, match="serves speculative_algorithm EAGLE3, and None is asked"):
                servers.url("vanilla", None)
            for key, value in (("speculative_num_steps", 3), ("dtype", "bfloat16")):
                running.info = {**right, key: value}
                with pytest.raises(ValueError, match=f"{running.url} serves {key} {value}"):
                    servers.url("eagle3", drafted)
            running.info = {**right, "model_path": "other", "speculative_draft_model_path": "another"}
            servers.url("eagle3", drafted, compiled=True)
            said = capsys.readouterr().out.splitlines()
            assert all(word in line for word, line in zip(("other", "another", "compile"), said, strict=True))
            running.info = {}  # an older server that tells nothing
            servers.url("eagle3", drafted)


def test_servers_that_do_not_fit_the_gpu_together_are_refused(
    engine: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tiny_target.device = torch.device("cpu")
    names = ["vanilla", "eagle3", "eagle"]

    def servers(**options: Any) -> Servers:
        return Servers(settings(engine, sglang={"options": options}), "sglang")

    with pytest.raises(ValueError, match=r"options\.mem-fraction-static is 0\.8.*of 3 at .* 0\.31 or less"):
        servers(**{"mem-fraction-static": 0.8}).check_memory(names)
    with pytest.raises(ValueError, match="mem-fraction-static is None"):
        servers().check_memory(names)
    servers(**{"mem-fraction-static": 0.31}).check_memory(names)
    servers(**{"mem-fraction-static": 0.8}).check_memory(names[:1])
    servers(device="cpu").check_memory(names)
    with pytest.raises(ValueError, match="of 5 at"):  # a sweep with three finalists
        ServedBench.start(settings(engine), "sglang", tiny_target, ExitStack())
    elsewhere = {"options": {"mem-fraction-static": 0.8}, "urls": dict.fromkeys(names[:2], "http://h:1")}
    Servers(settings(engine, sglang=elsewhere), "sglang").check_memory(names)
    with servers(**{"mem-fraction-static": 0.4}) as two:
        two.url("vanilla", None)
        two.url("trial", None)
        shares = [told(LOGS / f"sglang-{name}.log", "--mem-fraction-static") for name in ("vanilla", "trial")]
        assert shares == ["0.4", "0.667"], "of what the first leaves, so that both have the same"
        with pytest.raises(ValueError, match="of 3 at"):
            two.url("another", None)


def test_a_vllm_server_takes_its_share_of_all_memory_whatever_is_taken(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a target of a quarter of the GPU it dies at its start with the share that it takes by itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))

    def servers(**options: Any) -> Servers:
        return Servers(settings(engine, vllm={"options": options}), "vllm")

    with pytest.raises(ValueError, match=r"utilization is 0\.92.* of 1 at .* set it to 0\.7 or less"):
        servers().check_memory(["vanilla"])
    servers(**{"gpu-memory-utilization": 0.7}).check_memory(["vanilla"])
    with pytest.raises(ValueError, match=r"of 2 at .* 0\.35 or less"):
        servers(**{"gpu-memory-utilization": 0.7}).check_memory(["vanilla", "eagle3"])


def test_a_server_finds_the_tools_of_its_own_environment(engine: Path) -> None:
    """SGLang and FlashInfer call ninja by name, which is installed beside the engine's Python alone."""
    with Servers(settings(engine), "sglang") as servers:
        servers.url("vanilla", None)
        process = psutil.Process(int(told(LOGS / "sglang-vanilla.log", "pid")))
        assert process.environ()["PATH"].split(os.pathsep)[0] == str(engine.parent)


def test_on_a_gpu_float32_gets_kernels_that_take_it_and_nothing_is_kept_from_compiling(
    engine: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for options, backend in (({}, "triton"), ({"attention-backend": "x"}, "x"), ({"device": "cpu"}, None)):
        with Servers(settings(engine, sglang={"options": options}), "sglang") as servers:
            ServedBench(tiny_target, Path("drafts"), "sglang", servers, {}).vanilla()
            log = LOGS / "sglang-vanilla.log"
            assert "--disable-radix-cache" in log.read_text(), "a prefill out of the cache is none"
            if backend is None:
                assert "--attention-backend" not in log.read_text()
            else:
                assert told(log, "--attention-backend") == backend


def test_a_drafts_family_is_read_without_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "draft"
    with pytest.raises(ValueError, match="no draft there"):
        speculation_of(folder, 2, 1, 3)
    folder.mkdir()
    config = {"architectures": [formats.ARCHITECTURES["eagle3"]]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has not finished"):
        speculation_of(folder, 2, 1, 3)
    save_file({"midlayer.x": torch.zeros(1), "fc.weight": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert speculation_of(folder, 2, 1, 3).family == "eagle3", "only the tensors tell"
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(formats, "read_draft_files", None)
    assert speculation_of(folder, 2, 1, 3).family == "eagle3"


def kept(engine: Path) -> subprocess.Popen[str]:
    """`serving.py start`, once it says that it serves."""
    write_yaml(Path("params.yaml"), values(engine))
    script = ROOT / "experiments" / "serving.py"
    process = subprocess.Popen(
        [sys.executable, str(script), "start", "sglang", "vanilla"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("sglang serves vanilla at http://127.0.0.1:"):
            return process
    raise AssertionError("it ended before it served")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_kept_ends_with_its_keeper(engine: Path, number: signal.Signals) -> None:
    keeper = kept(engine)
    server = psutil.Process(int(told(LOGS / "sglang-vanilla.log", "pid")))
    keeper.send_signal(number)
    assert keeper.wait() == (1 if number == signal.SIGINT else 128 + number)
    assert not server.is_running()


def test_a_keeper_ends_when_its_server_dies_and_shows_why(engine: Path) -> None:
    keeper = kept(engine)
    log = LOGS / "sglang-vanilla.log"
    psutil.Process(int(told(log, "pid"))).kill()
    error = keeper.communicate()[1]
    assert keeper.returncode == 1
    assert "the server died, killed by SIGKILL" in error
    assert f"the end of {log}" in error
