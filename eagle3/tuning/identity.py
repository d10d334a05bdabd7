"""What a study's measurements depend on, compared: a study of other conditions is named as such."""

import json
from collections.abc import Mapping
from typing import Any

from eagle3.measure.records import changed_keys
from eagle3.provenance import without_password


def refusal(study: str, storage: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Why a study cannot go on under the conditions of now, and the way out; None where it can.

    Args:
        study, storage: the study's name, and the URL it is kept at.
        before, now: the conditions, JSON-like. Tuples are the lists that storing makes of them.
    """
    now = json.loads(json.dumps(now))
    changed = changed_keys(before, now)
    if not changed:
        return None
    differences = "; ".join(_difference(key, before, now) for key in changed)
    return (
        f"study {study!r} in {without_password(storage)} was measured under other conditions: {differences}. "
        "Its times do not compare with new ones: start another with --study <name>, or undo the change"
    )


def _difference(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """ "machine.cpu was A and is B", shortened."""

    def value(values: Any) -> str:
        for part in key.split("."):
            values = values.get(part) if isinstance(values, Mapping) else None
        text = json.dumps(values, ensure_ascii=False)
        return text if len(text) <= 40 else text[:37] + "..."

    return f"{key} was {value(before)} and is {value(now)}"
