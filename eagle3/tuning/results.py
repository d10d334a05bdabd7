"""A sweep as JSON: every trial with its state, every configuration, the cost model, the held-out rows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.tuning.cost_model import CostModel, prediction_errors
from eagle3.tuning.finalists import Outcome
from eagle3.tuning.measurement import Measurement
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.study import Record, known_configurations

# How many of the predictions are written out.
_PREDICTIONS = 20


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
    space: Space,
    identity: Mapping[str, Any],
    seed: int,
    held_out: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """What reports/sweep.json holds; `held_out` is of `held_out_results`."""
    known = known_configurations(records)
    return {
        "trials": [trial_row(record, seed) for record in records],
        **held_out,
        "cost_model": cost_model_rows(known, space),
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
        return {"study": study, "held_out": outcome.rows, "summary": outcome.summary}
    if path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier.get("study") == study and earlier["identity"] == json.loads(json.dumps(identity)):
            return {key: earlier[key] for key in ("study", "held_out", "summary")}
    return {"study": study, "held_out": [], "summary": None}


def cost_model_rows(known: Mapping[Configuration, Measurement], space: Space) -> dict[str, Any] | None:
    """The fitted model, its error on configurations it was not shown, and its best predictions."""
    model = CostModel.fit(known)
    if model is None:
        return None
    errors = prediction_errors(known)
    relative = [abs(predicted / measured - 1.0) for predicted, measured in errors.values()]
    costs = model.costs
    return {
        "acceptance_by_depth": list(model.acceptance.by_depth),
        "width_exponent": model.acceptance.width_exponent,
        "vanilla_ms_per_token": 1000 * costs.vanilla_token,
        "verify_ms": {"fixed": 1000 * costs.verify[0], "per_token": 1000 * costs.verify[1]},
        "draft_ms": {
            "fixed": 1000 * costs.draft[0],
            "per_step": 1000 * costs.draft[1],
            "per_node": 1000 * costs.draft[2],
        },
        "other_ms": {"fixed": 1000 * costs.other[0], "per_token": 1000 * costs.other[1]},
        "median_relative_error": float(np.median(relative)) if relative else None,
        "errors": [
            {"name": space.label(configuration), "predicted": predicted, "measured": measured}
            for configuration, (predicted, measured) in errors.items()
        ],
        "predictions": predictions(model, space),
    }


def predictions(model: CostModel, space: Space, count: int = _PREDICTIONS) -> list[dict[str, Any]]:
    """The configurations that the model predicts to be fastest."""
    predictable = [item for item in space.configurations() if item.drafted_whole]
    best: Iterable[Configuration] = sorted(predictable, key=lambda item: -model.speedup(item))
    return [
        {
            "name": space.label(item),
            "params": item.as_dict(),
            "speedup": model.speedup(item),
            "tau": model.acceptance.tau(item),
        }
        for item in list(best)[:count]
    ]
