"""What was measured on what, and how each number came about."""

from collections.abc import Mapping
from typing import Any

from eagle3.report.blocks import Block, Items, Paragraph, Table
from eagle3.report.inputs import Inputs
from eagle3.report.tables import key_value_table

# Shown as tables of their own, or as sentences.
_NOT_CODE = ("adaptive_costs_ms", "bound")
_NOT_SETTINGS = ("subject", "origin", "warm_up", "started", "finished", "resumed")


def how_measured(inputs: Inputs) -> tuple[Block, ...]:
    """The definitions, with this evaluation's own settings in them."""
    settings = inputs.evaluation["settings"]
    repeats = settings["repeats"]
    definitions = {
        "Speedup": (
            "vanilla's seconds per token over the method's, in totals over all prompts. Greedy outputs are "
            "the same tokens for all methods, so that this is the ratio of total times; sampled outputs "
            "differ in length, and a shorter answer must not count as speed."
        ),
        "Decode and end-to-end": (
            "decoding leaves out the prefill and the token it makes; end-to-end counts both."
        ),
        "Intervals": (
            "paired BCa bootstrap over prompts, 95 %, seeded. The turns of one prompt stay together."
        ),
        "vanilla-aa": (
            "vanilla measured a second time like any other method. Its interval contains 1 in 19 of 20 runs."
        ),
        "Order": (
            "all methods run in one process, over one target forward and one kind of cache, prompt by "
            "prompt; for each prompt the methods take turns in a random order drawn from the seed."
        ),
        "Repeats": (
            f"passes over all prompts: {repeats}; the median time of each generation counts. Before the "
            "first, every method runs untimed on the longest and the shortest prompt."
        ),
        "Length": (
            f"answers end at the target's end-of-sequence token or after {settings['max_new_tokens']} new "
            "tokens. Tokens are counted as token ids, never by tokenising text again."
        ),
        "Second turns": (
            "at T = 0 they continue vanilla's first answer, the same for every method; at T > 0 each method "
            "continues its own, sampled with the seed of the prompt."
        ),
        "τ, the mean acceptance length": (
            "tokens produced by verification rounds, over rounds. It counts the bonus token of a round and "
            "not the token of the prefill; the rounds of all prompts weigh the same."
        ),
        "When": (
            f"{moment(settings['started'])} to {moment(settings['finished'])}, in "
            f"{inputs.evaluation['verdict']['processes']} process(es)."
        ),
    }
    sentences = [f"{name}: {text}" for name, text in definitions.items()]
    return (Items(tuple(Paragraph(sentence) for sentence in sentences)),)


def moment(text: str) -> str:
    """ "2026-01-31 14:05 UTC" from ISO 8601 in UTC."""
    return f"{text[:10]} {text[11:16]} UTC"


def subject_table(inputs: Inputs) -> Table:
    """Target, drafts, code."""
    settings = inputs.evaluation["settings"]
    origin = {key: value for key, value in settings["origin"].items() if key not in _NOT_CODE}
    values: dict[str, Any] = {}
    if inputs.target:
        values["target"] = inputs.target
    if inputs.drafts:
        values["draft"] = inputs.drafts
    return key_value_table(
        "Target, drafts and code",
        {**values, "measured": settings["subject"], "code": origin},
        ("What", "Value"),
    )


def machine_table(inputs: Inputs) -> Table:
    """The machine's fingerprint, and its load while measuring."""
    load = inputs.evaluation["verdict"]["load"]
    return key_value_table(
        "Machine", {**inputs.evaluation["machine"], "load": _rounded(load)}, ("What", "Value")
    )


def setting_table(inputs: Inputs) -> Table:
    """The evaluation's settings, and the untimed generations before it."""
    settings = inputs.evaluation["settings"]
    shown = {key: value for key, value in settings.items() if key not in _NOT_SETTINGS}
    return key_value_table(
        "Settings of the evaluation",
        {**shown, "warm_up": _rounded(settings["warm_up"])},
        ("Setting", "Value"),
    )


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Floats with three digits, at any depth."""
    return {
        key: _rounded(value)
        if isinstance(value, Mapping)
        else round(value, 3)
        if isinstance(value, float)
        else value
        for key, value in values.items()
    }
