"""Real engines on this CPU: environments, a workspace with a trained draft, and settings for both.

`make test-serving` prepares what these fixtures look for: .venv-test-sglang and .venv-test-vllm, and a target
with drafts, of the project's own run or else of the smoke run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import Settings, parse_settings
from eagle3.parameters import merge, read_profile

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "cpu_stand_in"
CHAIN = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 8}
# One thread an engine: more of them contend on a small machine.
SGLANG: dict[str, Any] = {
    "python": str(ROOT / ".venv-test-sglang/bin/python"),
    "timed": False,
    "options": {
        "device": "cpu",
        "mem-fraction-static": 0.3,
        "max-total-tokens": 8192,
        "skip-server-warmup": True,
        "attention-backend": "torch_native",
        "prefill-attention-backend": "intel_amx",
        "decode-attention-backend": "intel_amx",
    },
    "environment": {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(STAND_IN),
    },
    "urls": {},
}
VLLM: dict[str, Any] = {
    "python": str(ROOT / ".venv-test-vllm/bin/python"),
    "timed": False,  # a test machine does other things meanwhile
    "options": {"max-model-len": 1024, "max-num-seqs": 4},
    "environment": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
    "urls": {},
}


def workspace() -> Path:
    """The folder whose pipeline made a target and drafts."""
    for folder in (ROOT, ROOT / ".smoke"):
        if (folder / "models/drafts/eagle3/model.safetensors").is_file():
            return folder
    raise FileNotFoundError("no trained draft: run `make test-serving`, which makes one, not pytest alone")


def serving_values() -> dict[str, Any]:
    """Values for params.yaml: float32, the four experiments, SGLang on the stand-in."""
    return {
        "tracking": {"uri": "sqlite:///mlflow.db"},
        "evaluate": {"dtype": "float32"},
        "serving": {
            "prompts_per_task": 1,
            "max_new_tokens": 24,
            "concurrency": [1, 2],
            "start_timeout": 300.0,
            "experiments": [
                {"name": "vanilla", "draft": None, "tree": None, "compile": False},
                {"name": "eagle", "draft": "eagle", "tree": TREE, "compile": False},
                {"name": "eagle-compile", "draft": "eagle", "tree": TREE, "compile": True},
                {"name": "eagle3", "draft": "eagle3", "tree": TREE, "compile": False},
                {"name": "eagle3-chain", "draft": "eagle3", "tree": CHAIN, "compile": False},
            ],
            "sglang": SGLANG,
            "vllm": VLLM,
        },
    }


def serving_settings() -> Settings:
    """`serving_values` over the default profile."""
    return parse_settings(merge(read_profile("default", ROOT / "profiles"), serving_values()))


@pytest.fixture
def served_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of its own over the trained models and prepared tasks; the current folder."""
    source = workspace()
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(source / name)
    for name in ("reports", "runs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return tmp_path


@pytest.fixture(autouse=True)
def _attentive_to_signals() -> Iterator[None]:
    """Under nohup and in a script's background, tests and their children inherit ignored signals."""
    defaults: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
