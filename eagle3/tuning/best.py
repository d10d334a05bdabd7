"""best_params.yaml: what a sweep found, and for which machine and draft it holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3 import paths
from eagle3.config.sections import Engine
from eagle3.measure.records import changed_keys
from eagle3.provenance import write_yaml
from eagle3.serving.bench import speculation_of
from eagle3.serving.engines import speculative_flags
from eagle3.tuning.finalists import Outcome
from eagle3.tuning.space import Configuration


@dataclass(frozen=True)
class BestParameters:
    """The winner of a sweep on held-out prompts."""

    name: str
    configuration: Configuration
    tuned: bool  # False: it is one of the defaults


def winner_flags(configuration: Configuration, engine: Engine) -> str:
    """A configuration's draft and tree as flags of a server, ready to paste.

    Args:
        engine: that it was measured with; the flags are vLLM's for that, else SGLang's.
    """
    speculation = speculation_of(paths.DRAFTS / configuration.draft, **configuration.tree)
    if engine == "vllm":  # which compiles by itself
        return speculative_flags("vllm", speculation)
    flags = speculative_flags("sglang", speculation)
    # With a server the whole of it was compiled; natively the draft alone, for which SGLang has no flag.
    compiled = engine == "sglang" and configuration.backend == "compile"
    return f"{flags} --enable-torch-compile" if compiled else flags


def flags_note(configuration: Configuration) -> str | None:
    """What the flags cannot say; None where they say all."""
    if configuration.drafted_whole:
        return None
    return f"SGLang drafts every tree whole: confidence {configuration.confidence:g} has no flag there"


def write_best(
    path: Path, outcome: Outcome, engine: Engine, flags: str, fingerprint: Mapping[str, Any], command: str
) -> None:
    """Write the winner; there must be one.

    Args:
        engine, flags: as `winner_flags` took and made them.
        fingerprint: "machine", "target" and "draft" that the times belong to.
        command: what made the file.
    """
    winner = outcome.winner
    assert winner is not None, "no winner to write"
    row, over = outcome.row(winner), outcome.over_default
    write_yaml(
        path,
        {
            "command": command,
            "name": winner.name,
            "tuned": winner.tuned,
            "beats_default": outcome.beats_default,
            "summary": outcome.summary,
            "params": winner.configuration.as_dict(),
            ("vllm" if engine == "vllm" else "sglang"): flags,
            **({"sglang_note": note} if (note := flags_note(winner.configuration)) else {}),
            "held_out": {
                key: row[key] for key in ("speedup", "speedup_low", "speedup_high", "tau", "prompts")
            },
            "over_best_default": None
            if over is None
            else {"speedup": over.estimate, "low": over.low, "high": over.high},
            "fingerprint": dict(fingerprint),
        },
    )


def read_best(path: Path, fingerprint: Mapping[str, Any]) -> BestParameters:
    """Read the winner for this machine, target and draft.

    Args:
        fingerprint: as given to `write_best`, of now.

    Raises:
        ValueError: if the file is missing, cannot be read, or belongs to another machine, target or draft.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: run python experiments/sweep.py first")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        best = BestParameters(values["name"], Configuration(**values["params"]), bool(values["tuned"]))
        before = values["fingerprint"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a sweep's result ({error!r}): run the sweep again") from error
    if changed := changed_keys(before, fingerprint):
        raise ValueError(
            f"{path} was tuned for another {', '.join(changed)}: run python experiments/sweep.py again"
        )
    return best
