"""Command lines of SGLang and vLLM servers, from what they are to serve.

Flag names are those of SGLang 0.5.23 and vLLM 0.32. Names that people still copy from older pages are
translated, with a warning, where the translation keeps their meaning.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.config.sections import ServingEngine as Engine
from eagle3.models.formats import read_values

Option = bool | int | float | str | Sequence[int | float | str] | None

# SGLang's name of the algorithm by the draft's family.
ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
# Old option -> the options it stands for now; None keeps the value given.
_TRANSLATED: dict[Engine, dict[str, dict[str, Option]]] = {
    "sglang": {
        "cuda-graph-max-bs": {"cuda-graph-max-bs-decode": None},
        "cuda-graph-bs": {"cuda-graph-bs-decode": None},
        "disable-cuda-graph": {
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
        },
    },
    "vllm": {},
}
# Options that follow from the rest of params.yaml; given a second time, they could contradict it.
_OWN: dict[Engine, tuple[str, ...]] = {
    "sglang": (
        "model-path",
        "model",
        "host",
        "port",
        "dtype",
        "enable-metrics",
        "enable-torch-compile",
        "speculative-algorithm",
        "speculative-draft-model",  # its older name
        "speculative-draft-model-path",
        "speculative-num-steps",
        "speculative-eagle-topk",
        "speculative-num-draft-tokens",
    ),
    "vllm": (
        "model",
        "host",
        "port",
        "dtype",
        "enforce-eager",
        "speculative-config",
        "per-request-spec-decode-metrics",
    ),
}
_INCREMENTAL = "incremental-streaming-output"  # SGLang's


@dataclass(frozen=True)
class Speculation:
    """A draft and the tree it is asked for, in SGLang's names."""

    family: str  # "eagle" or "eagle3"
    draft: Path
    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def tree(self) -> dict[str, int]:
        """The tree's part alone."""
        return {key: getattr(self, key) for key in ("num_steps", "topk", "num_draft_tokens")}


@dataclass(frozen=True)
class Service:
    """What a server is to serve, and how."""

    target: Path
    dtype: str
    speculation: Speculation | None = None  # None: vanilla
    compiled: bool | None = False  # the models through torch.compile; None: as the engine does by itself


def command(
    engine: Engine, python: Path, service: Service, host: str, port: int, options: Mapping[str, Option]
) -> list[str]:
    """The command that starts the server.

    Args:
        python: of the environment that has the engine.
        options: further options in the engine's names, without the leading dashes (see `as_flags`).

    Raises:
        ValueError: for a draft or tree that the engine cannot take, or an option that is set elsewhere.
    """
    for name in options:
        if name == _INCREMENTAL:
            raise ValueError(
                f"serving.{engine}.options.{name}: every piece of an answer is read as the whole so far, "
                "which this changes; take it out"
            )
        if name in _OWN[engine]:
            raise ValueError(
                f"serving.{engine}.options.{name}: follows from the rest of params.yaml; take it out"
            )
    make = _sglang if engine == "sglang" else _vllm
    module, flags = make(service)
    if engine == "vllm":  # its switches that are on by themselves are turned off by their negation
        options = {
            f"no-{name}" if value is False else name: True if value is False else value
            for name, value in options.items()
        }
    return [str(python), "-m", module, *as_flags({**flags, "host": host, "port": port, **options})]


def speculative_flags(engine: Engine, speculation: Speculation) -> str:
    """The draft and its tree as options of the engine's server, ready to paste into a shell."""
    make = _speculative if engine == "sglang" else _speculative_config
    return shlex.join(as_flags(make(speculation)))


def translate(
    engine: Engine, options: Mapping[str, Option], warn: Callable[[str], None]
) -> dict[str, Option]:
    """The options under the names that the engine takes today; `warn` hears of every one that changed.

    Underscores are dashes, and leading dashes are dropped.
    """
    result: dict[str, Option] = {}
    for given, value in options.items():
        name = given.lstrip("-").replace("_", "-")
        renamed = _TRANSLATED[engine].get(name)
        if renamed is None:
            result[name] = value
        elif value is not False:
            result |= {new: value if fixed is None else fixed for new, fixed in renamed.items()}
            warn(f"serving.{engine}.options.{given} is now {', '.join(renamed)}; translated")
    return result


def as_flags(options: Mapping[str, Option]) -> list[str]:
    """{"a": 1, "b": True, "c": [1, 2]} -> --a 1 --b --c 1 2; False and None are left out."""
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name}")
        if isinstance(value, list | tuple):
            flags += [str(item) for item in value]
        elif value is not True:
            flags.append(str(value))
    return flags


def _sglang(service: Service) -> tuple[str, dict[str, Option]]:
    flags: dict[str, Option] = {
        "model-path": service.target.as_posix(),
        "dtype": service.dtype,
        "enable-metrics": True,
        "enable-torch-compile": bool(service.compiled),
    }
    if service.speculation is not None:
        _check_draft("sglang", service.speculation.draft, service.target)
        flags |= _speculative(service.speculation)
    return "sglang.launch_server", flags


def _check_draft(engine: Engine, folder: Path, target: Path) -> None:
    """Refuse a draft that the engine computes in another way than it was trained: it would only accept less.

    Found by reading SGLang 0.5.23 (models/llama_eagle3.py), which knows no norm_before_residual and an fc of
    three states alone, and vLLM 0.32 (model_executor/models/llama_eagle3.py), which drops fc where
    use_aux_hidden_state is false.
    """
    if not folder.is_dir():
        return  # the engine says so
    values = read_values(folder)
    if values.get("norm_before_residual") and engine == "sglang":
        raise ValueError(
            f"{folder}: norm_before_residual is true, which SGLang ignores, so that the draft would lose "
            "acceptance without an error; serve it with vLLM, or decode with the native engine"
        )
    layers = values.get("eagle_aux_hidden_state_layer_ids") or ()
    config = target / "config.json"
    if layers and config.is_file() and max(layers) >= json.loads(config.read_text())["num_hidden_layers"]:
        raise ValueError(
            f"{folder}: reads the output of the target's last layer (capture_layers {list(layers)}), which "
            "is here the state after the final norm, and with servers the one before it, or none; decode "
            "with the native engine, or train it with an earlier layer"
        )
    if not (values.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise ValueError(
            f"{folder}: reads the final state alone (fused: false), which neither SGLang nor vLLM computes; "
            "decode with the native engine, or train it with fused: true"
        )


def _speculative(speculation: Speculation) -> dict[str, Option]:
    return {
        "speculative-algorithm": ALGORITHMS[speculation.family],
        "speculative-draft-model-path": speculation.draft.as_posix(),
        "speculative-num-steps": speculation.num_steps,
        "speculative-eagle-topk": speculation.topk,
        "speculative-num-draft-tokens": speculation.num_draft_tokens,
    }


def _speculative_config(speculation: Speculation) -> dict[str, Option]:
    config: dict[str, Any] = {
        "method": speculation.family,
        "model": speculation.draft.as_posix(),
        "num_speculative_tokens": speculation.num_steps,
    }
    return {"speculative-config": json.dumps(config)}


def _vllm(service: Service) -> tuple[str, dict[str, Option]]:
    flags: dict[str, Option] = {
        "model": service.target.as_posix(),
        "dtype": service.dtype,
        "enforce-eager": service.compiled is False,
    }
    speculation = service.speculation
    if speculation is not None:
        if speculation.topk != 1:
            raise ValueError(
                f"vLLM drafts chains only, and topk {speculation.topk} is asked: use topk 1, or SGLang"
            )
        if speculation.family == "eagle":
            raise ValueError(
                "vLLM's EAGLE (EagleLlamaForCausalLM) has no bias in fc, and this project's draft has one: "
                "serve it with SGLang, or take an EAGLE-3 draft"
            )
        _check_draft("vllm", speculation.draft, service.target)
        flags |= _speculative_config(speculation)
        flags["per-request-spec-decode-metrics"] = "detailed"
    return "vllm.entrypoints.openai.api_server", flags
