"""Numbers as text, the same everywhere in the report."""

from collections.abc import Mapping
from typing import Any

from eagle3.measure.statistics import is_slower
from eagle3.report.blocks import TableCell, Tone

MISSING = "–"
SLOWER = "▼"
UNCLEAR = "≈"
MARKS_NOTE = f"{SLOWER} slower than vanilla; {UNCLEAR} the interval contains 1, so no gain is shown."


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Fixed digits and thousands separators; a dash where nothing was measured."""
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as per cent."""
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def interval(row: Mapping[str, Any], key: str) -> str:
    """ "2.13× (2.01–2.25)"; "(no interval)" where there is none."""
    value = row.get(key)
    if value is None:
        return MISSING
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    bounds = "no interval" if low is None or high is None else f"{low:.2f}–{high:.2f}"
    return f"{value:.2f}× ({bounds})"


def speedup_cell(row: Mapping[str, Any], key: str = "speedup") -> TableCell:
    """A speedup with its interval, marked with SLOWER or UNCLEAR; `MARKS_NOTE` explains the marks."""
    text, value = interval(row, key), row.get(key)
    if value is None or row["method"] in ("vanilla", "vanilla-aa"):
        return TableCell(text)
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    if is_slower(value, high):
        return TableCell(f"{text} {SLOWER}", Tone.BAD)
    if low is not None and low <= 1.0:
        return TableCell(f"{text} {UNCLEAR}", Tone.WARNING)
    return TableCell(text, Tone.GOOD)


def tree_text(tree: Mapping[str, int] | None) -> str:
    """A tree in SGLang's names: num_steps / topk / num_draft_tokens."""
    if not tree:
        return MISSING
    if {"num_steps", "topk", "num_draft_tokens"} <= tree.keys():
        text = f"{tree['num_steps']} / {tree['topk']} / {tree['num_draft_tokens']}"
        text = f"up to {text}" if tree.get("adaptive") else text
        return f"{text}, or {tree['copied']} copied" if tree.get("copied") else text
    return ", ".join(f"{key} {value}" for key, value in tree.items())


def temperature_text(temperature: float) -> str:
    """ "T = 0 (greedy)" or "T = 1"."""
    return f"T = {temperature:g}" + (" (greedy)" if temperature == 0 else "")
