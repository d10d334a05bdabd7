"""A sweep as JSON: every trial with its state, the held-out rows, the cost models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.tuning.finalists import Outcome
from eagle3.tuning.study import Record


def trial_row(record: Record, seed: int) -> dict[str, Any]:
    """One trial: `speedup` and its interval of all that was known of its configuration when it ended.

    A trial that was stopped early has no speedup: it was measured on some of the prompts; nor has one that
    measured nothing. What was known then is their `partial_speedup`.
    """
    known = record.known
    complete = record.state == "complete" and known is not None
    row: dict[str, Any] = {
        "number": record.number,
        "state": record.state,
        "params": record.configuration.as_dict() if record.configuration is not None else None,
        "source": record.source,
        "reason": record.reason,
        "speedup": None,
        "speedup_low": None,
        "speedup_high": None,
        "tau": known.tau if known is not None else None,
        "repeats": known.repeats if known is not None else 0,
        "prompts": len(known.prompts) if known is not None else 0,
        "partial_speedup": known.speedup() if known is not None and not complete else None,
        "round_ms": known.round_ms() if known is not None else None,
        "different_outputs": known.different_outputs if known is not None else None,
        "seconds": record.seconds,
        "foreign_cpu": record.foreign_cpu,
    }
    if known is not None and complete:
        interval = known.interval(seed)
        row |= {
            "speedup": interval.estimate,
            "speedup_low": interval.low,
            "speedup_high": interval.high,
        }
    return row


def sweep_results(
    records: list[Record],
    identity: Mapping[str, Any],
    seed: int,
    held_out: Mapping[str, Any],
    cost_model: Mapping[str, Any] | None,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """What reports/sweep.json holds; `held_out` is of `held_out_results`, `cost_model` of `Predictions`."""
    return {
        "trials": [trial_row(record, seed) for record in records],
        **held_out,
        "cost_model": cost_model,
        "identity": dict(identity),
        "origin": dict(origin),
    }


def held_out_results(
    path: Path, study: str, identity: Mapping[str, Any], outcome: Outcome | None
) -> dict[str, Any]:
    """The rows on held-out prompts with their summary, and the study that they belong to.

    A run that ended before it measured any has those of the study's earlier run, as best_params.yaml has.

    Args:
        path: of the results that will be replaced.
    """
    if outcome is not None:
        return {
            "study": study,
            "held_out": outcome.rows,
            "summary": outcome.summary,
            "reservations": list(outcome.reservations),
        }
    if path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier.get("study") == study and earlier["identity"] == json.loads(json.dumps(identity)):
            return {key: earlier[key] for key in ("study", "held_out", "summary", "reservations")}
    return {"study": study, "held_out": [], "summary": None, "reservations": []}
