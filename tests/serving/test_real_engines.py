"""SGLang and vLLM really running on a CPU, held against the native engine: `make test-serving`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3 import paths
from eagle3.config import Settings
from eagle3.data.endpoint import Endpoint
from eagle3.decoding.sampling import Sampling
from eagle3.measure.bench import Bench
from eagle3.measure.prompts import task_prompts
from eagle3.measure.rendering import ChatRenderer
from eagle3.models.target import Target
from eagle3.parameters import merge, read_profile
from eagle3.provenance import write_yaml
from eagle3.serving.agreement import Agreement, agree
from eagle3.serving.bench import speculation_of
from eagle3.serving.engines import Engine, Speculation
from eagle3.serving.experiments import native_decoder
from eagle3.serving.load import answer_all
from eagle3.serving.servers import Servers
from tests.serving.conftest import ROOT, serving_settings, serving_values

pytestmark = pytest.mark.serving
NEW_TOKENS = 32


def run_script(name: str, *arguments: str, **changes: Any) -> str:
    """A script of experiments/ in the current folder, with params.yaml of the tests and these changes."""
    values = merge(merge(read_profile("default", ROOT / "profiles"), serving_values()), changes)
    write_yaml(Path("params.yaml"), values)
    script = ROOT / "experiments" / name
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def target(served_project: Path) -> Target:
    return Target.load(paths.TARGET)


@pytest.fixture
def bench(target: Target) -> Bench:
    return Bench(target, paths.DRAFTS, target.dtype)


@pytest.fixture
def prompts(target: Target) -> list[tuple[str, list[int]]]:
    """Enough of them that another rotary base shows: on a few short ones it changes no acceptance."""
    renderer = ChatRenderer(target.tokenizer, target.eos_token_ids)
    chosen = task_prompts(paths.TASKS, ["mt_bench", "gsm8k"], "held_out", 2)
    return [("/".join(prompt.key), renderer(prompt, [])) for prompt in chosen]


@pytest.fixture
def settings() -> Settings:
    return serving_settings()


def gate(
    settings: Settings,
    engine: Engine,
    served: Speculation,
    native: Speculation,
    prompts: list[tuple[str, list[int]]],
    bench: Bench,
) -> Agreement:
    """The agreement of a draft that an engine serves with one that the native engine decodes with."""
    with Servers(settings, engine) as servers:
        url = servers.url("gate", served)
        answers, _ = answer_all(engine, url, [ids for _, ids in prompts], NEW_TOKENS, 1)
    return agree(native_decoder(bench, native), prompts, answers, NEW_TOKENS)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_four_experiments_agree_with_the_native_engine(served_project: Path, engine: str) -> None:
    """fp32: equal tokens, equal rounds, equal hidden states; the counters are the requests' own sums."""
    print(run_script("serving.py", "measure", engine))
    result = json.loads((served_project / paths.SERVING).read_text())[engine]
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in result["experiments"]}
    assert result["tokens_equal"], rows
    assert result["acceptance_equal"], rows
    assert {"vanilla", "eagle3", "eagle3-chain"} <= {name for name, row in rows.items() if "levels" in row}
    if engine == "sglang":
        assert result["hidden_states_equal"]
        assert "levels" in rows["eagle"]
    else:
        assert "no bias in fc" in rows["eagle"]["unavailable"]
    for row in rows.values():
        for level in row.get("levels", ()):
            assert level["counters"]["agree"], level["counters"]
            assert (level["tau"] is None) == (row["tree"] is None)


@pytest.fixture
def broken(served_project: Path, request: pytest.FixtureRequest) -> Path:
    """The draft as an engine would hold it that reads one thing wrongly."""
    kind = request.param
    folder = served_project / f"broken-{kind}"
    shutil.copytree(paths.DRAFTS / "eagle3", folder)
    config_file, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(config_file.read_text())
    if kind == "layer":
        layers = json.loads((folder / "manifest.json").read_text())["capture_layers"]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}  # an id k is hs[k + 1]
        config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    elif kind == "rope":
        config["rope_theta"] = 10000.0
        config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 10000.0}
    else:
        tensors = load_file(weights)
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))  # absolute ids for offsets
        tensors["d2t"] = tensors["d2t"].clamp(max=config["vocab_size"] - len(tensors["d2t"]))
        save_file(tensors, weights, metadata={"format": "pt"})
    config_file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("broken", ["layer", "rope", "mapping"], indirect=True)
def test_the_gate_catches_a_draft_that_is_read_wrongly(
    broken: Path, settings: Settings, prompts: list[tuple[str, list[int]]], bench: Bench
) -> None:
    """A layer off by one, another rotary base, a mapping read as ids: lossless, and another acceptance."""
    right = speculation_of(paths.DRAFTS / "eagle3", 3, 1, 4)
    wrong = Speculation("eagle3", broken, 3, 1, 4)
    result = gate(settings, "sglang", wrong, right, prompts, bench)
    assert result.tokens_equal, result.differences
    assert not result.acceptance_equal


# The least that an evaluation and a sweep can be: every decoder is a server that takes a minute to start.
SHORT = {"tasks": ["gsm8k"], "prompts_per_task": 2, "max_new_tokens": 12, "repeats": 1}
EAGLE3 = {
    "name": "eagle3",
    "drafter": "head",
    "draft": "eagle3",
    "tree": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "backend": "kernels",
}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_evaluation_decodes_through_servers(served_project: Path, engine: str) -> None:
    """The same records and checks as of the native engine: every output is held against vanilla's."""
    evaluation = {**SHORT, "engine": engine, "methods": [EAGLE3]}
    run_script("fingerprint.py", evaluate=evaluation)
    print(run_script("evaluate.py", evaluate=evaluation))
    report = json.loads((served_project / paths.REPORTS / "evaluation.json").read_text())
    subject = report["settings"]["subject"]
    assert subject["engine"] == engine
    assert subject["version"]
    rows = {row["method"]: row for row in report["results"] if row["task"] == "all"}
    assert list(rows) == ["vanilla", "vanilla-aa", "eagle3"]
    assert rows["eagle3"]["lossless"] == {"compared": 2, "exact": 2, "near_ties": 0, "failures": 0}
    assert rows["eagle3"]["tau"] > 1
    assert rows["vanilla"]["tokens"] == rows["eagle3"]["tokens"] > 12


def test_a_sweep_tunes_a_served_engine(served_project: Path) -> None:
    space = {"max_num_steps": 2, "max_topk": 1, "max_num_draft_tokens": 3}
    held_out = {"finalists": 1, "prompts_per_task": 2, "max_new_tokens": 12, "repeats": 1}
    sweep = {**SHORT, "engine": "sglang", "space": space, "held_out": held_out}
    evaluate = {"methods": [EAGLE3]}
    print(run_script("sweep.py", "--trials", "2", sweep=sweep, evaluate=evaluate))
    result = json.loads((served_project / paths.REPORTS / "sweep.json").read_text())
    trials = [trial for trial in result["trials"] if trial["seconds"] is not None]
    assert len(trials) == 2
    for trial in trials:
        assert trial["state"] in ("complete", "pruned")
        assert trial["params"]["num_steps"] in (1, 2)
        assert trial["tau"] > 1
        assert trial["different_outputs"] == 0
    assert result["held_out"]
    assert all(row["tau"] > 1 for row in result["held_out"])


def test_regeneration_takes_the_engines_token_ids(
    served_project: Path, settings: Settings, prompts: list[tuple[str, list[int]]], bench: Bench
) -> None:
    """The protocols that `regenerate.endpoints` speaks, against the real servers."""
    engines: tuple[Engine, ...] = ("sglang", "vllm")
    for engine in engines:
        with Servers(settings, engine) as servers:
            endpoint = Endpoint(servers.url("vanilla", None))
            for _, ids in prompts[:2]:
                tokens = endpoint.complete(ids, 12, Sampling())
                mine = native_decoder(bench, None).generate(ids, 12, Sampling())
                assert tuple(tokens) == mine.token_ids, engine
