"""Answers to results: one row a method, task and temperature, and the table of single prompts."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from eagle3.measure.acceptance import (
    acceptance_by_context,
    acceptance_histogram,
    conditional_acceptance,
    mean_acceptance_length,
)
from eagle3.measure.losslessness import Comparison, count_outcomes
from eagle3.measure.medians import Answer, AnswerKey
from eagle3.measure.protocol import VANILLA, VANILLA_AGAIN
from eagle3.measure.statistics import Interval, is_slower, speedup_interval

ALL_TASKS = "all"

Comparisons = Mapping[AnswerKey, Comparison]


def results_table(
    answers: Sequence[Answer],
    comparisons: Comparisons,
    *,
    dtype: str,
    trees: Mapping[str, Mapping[str, int] | None],
    seed: int,
) -> list[dict[str, Any]]:
    """One result a method x task (and task "all") x temperature, methods and tasks in order of appearance.

    Times are in milliseconds where the name says so, and null means that there was nothing to measure.
    `speedup` and its interval are of decoding,
    `end_to_end_speedup` of prefill and decoding; both over the vanilla row of the same task and temperature.
    `tokens_per_second` and `decode_ms_per_token` leave out the prefill and its token. `round_ms` splits the
    mean verification round; `other` is the engine's own time between the four parts.
    """
    groups: dict[tuple[str, str, float], list[Answer]] = defaultdict(list)
    for answer in answers:
        for task in (answer.key.task, ALL_TASKS):
            groups[answer.key.method, task, answer.key.temperature].append(answer)
    methods = list(dict.fromkeys(answer.key.method for answer in answers))
    tasks = [ALL_TASKS, *dict.fromkeys(answer.key.task for answer in answers)]
    temperatures = sorted({answer.key.temperature for answer in answers})
    return [
        {
            "method": method,
            "task": task,
            "temperature": temperature,
            "dtype": dtype,
            "tree": trees.get(method),
            **_result(
                groups[method, task, temperature], groups[VANILLA, task, temperature], comparisons, seed
            ),
        }
        for temperature in temperatures
        for task in tasks
        for method in methods
        if groups[method, task, temperature]
    ]


def _result(
    answers: Sequence[Answer], vanilla: Sequence[Answer], comparisons: Comparisons, seed: int
) -> dict[str, Any]:
    rounds = [answer.rounds for answer in answers]
    depths = conditional_acceptance(rounds)
    is_vanilla = answers[0].key.method in (VANILLA, VANILLA_AGAIN)
    tokens = sum(len(answer.token_ids) for answer in answers)
    decode_tokens = sum(answer.decode_tokens for answer in answers)
    decode_seconds = sum(answer.decode_seconds for answer in answers)
    # Where every answer ends with the prefill's token there is nothing to decode and no speedup.
    decodes = decode_tokens > 0 and any(answer.decode_tokens for answer in vanilla)
    decode = _speedup(answers, vanilla, seed, end_to_end=False) if decodes else None
    end_to_end = _speedup(answers, vanilla, seed, end_to_end=True)
    slower = decode is not None and is_slower(decode.estimate, decode.high)
    return {
        "prompts": len({(answer.key.task, answer.key.prompt_id) for answer in answers}),
        "generations": len(answers),
        "tokens": tokens,
        # One forward of the target makes one token: vanilla's acceptance length is 1 by definition.
        "tau": 1.0 if is_vanilla else mean_acceptance_length(rounds),
        "rounds": sum(len(item.produced) for item in rounds),
        "acceptance_by_depth": [depth.rate for depth in depths],
        "acceptance_reached": [depth.reached for depth in depths],
        "acceptance_histogram": acceptance_histogram(rounds),
        "tau_by_context": [vars(bucket) for bucket in acceptance_by_context(rounds)],
        "tokens_per_second": decode_tokens / decode_seconds if decode_tokens else None,
        "speedup": decode.estimate if decode else None,
        "speedup_low": decode.low if decode else None,
        "speedup_high": decode.high if decode else None,
        "speedup_interval": decode.method if decode else "none",
        "end_to_end_speedup": end_to_end.estimate,
        "end_to_end_speedup_low": end_to_end.low,
        "end_to_end_speedup_high": end_to_end.high,
        "slower_than_vanilla": slower and not is_vanilla,
        "prefill_ms": 1000 * sum(answer.prefill_seconds for answer in answers) / len(answers),
        "decode_ms_per_token": 1000 * decode_seconds / decode_tokens if decode_tokens else None,
        "round_ms": _round_ms(answers),
        "truncated": sum(answer.finish_reason == "length" for answer in answers),
        "repeatable": all(answer.repeatable for answer in answers),
        # Weighted by tokens: the spread of a two-token answer says nothing.
        "repeat_spread": sum(answer.spread * answer.decode_tokens for answer in answers)
        / max(decode_tokens, 1),
        "lossless": count_outcomes(
            comparisons[answer.key].outcome for answer in answers if answer.key in comparisons
        ).as_dict(),
    }


def pairs_table(
    per_prompt: pd.DataFrame, pairs: Sequence[tuple[str, str]], seed: int
) -> list[dict[str, Any]]:
    """Decode speedup of one method over another, over all tasks, by temperature and paired by prompt.

    Args:
        per_prompt: as `prompt_table` makes it.
    """
    rows = []
    for temperature, table in per_prompt.groupby("temperature"):
        decoding = set(table.loc[table["tokens"] > 1, "method"])
        for method, other in pairs:
            if {method, other} <= decoding:
                found = paired_speedup(table, other, method, seed)
                rows.append(
                    {
                        "method": method,
                        "over": other,
                        "temperature": temperature,
                        "speedup": found.estimate,
                        "speedup_low": found.low,
                        "speedup_high": found.high,
                    }
                )
    return rows


def paired_speedup(per_prompt: pd.DataFrame, baseline: str, method: str, seed: int) -> Interval:
    """Decode speedup of one method over another at one temperature, paired by prompt."""
    keys = ["task", "prompt_id"]
    table = per_prompt.assign(decode_tokens=per_prompt["tokens"] - 1)
    sums = table.groupby(["method", *keys])[["decode_seconds", "decode_tokens"]].sum()
    first, second = sums.loc[baseline].align(sums.loc[method], join="inner")
    return speedup_interval(
        first["decode_seconds"].tolist(),
        second["decode_seconds"].tolist(),
        first["decode_tokens"].tolist(),
        second["decode_tokens"].tolist(),
        seed=seed,
    )


def _speedup(
    answers: Sequence[Answer], vanilla: Sequence[Answer], seed: int, *, end_to_end: bool
) -> Interval:
    """Paired by prompt; the turns of one prompt are added up, since they are not independent.

    Decode tokens are counted for decode times and all new tokens for end-to-end times.
    """
    totals = [_by_prompt(group, end_to_end) for group in (vanilla, answers)]
    assert totals[0].keys() == totals[1].keys(), "vanilla and the method were measured on different prompts"
    keys = sorted(totals[0])
    if answers[0].key.method == VANILLA:
        return Interval(1.0, 1.0, 1.0, "by definition", len(keys))
    return speedup_interval(
        [totals[0][key][0] for key in keys],
        [totals[1][key][0] for key in keys],
        [totals[0][key][1] for key in keys],
        [totals[1][key][1] for key in keys],
        seed=seed,
    )


def _by_prompt(answers: Iterable[Answer], end_to_end: bool) -> dict[tuple[str, str], tuple[float, int]]:
    """(task, prompt id) -> (seconds, tokens)."""
    totals: dict[tuple[str, str], tuple[float, int]] = {}
    for answer in answers:
        seconds = answer.total_seconds if end_to_end else answer.decode_seconds
        tokens = len(answer.token_ids) if end_to_end else answer.decode_tokens
        key = (answer.key.task, answer.key.prompt_id)
        before = totals.get(key, (0.0, 0))
        totals[key] = (before[0] + seconds, before[1] + tokens)
    return totals


def _round_ms(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Milliseconds of a mean round by part; None for a method without rounds."""
    rounds = sum(len(answer.rounds.produced) for answer in answers)
    if not rounds:
        return None
    parts = {
        "draft": sum(answer.draft_seconds for answer in answers),
        "verify": sum(answer.verify_seconds for answer in answers),
        "accept": sum(answer.accept_seconds for answer in answers),
        "cache": sum(answer.cache_seconds for answer in answers),
    }
    # Medians are taken of each part by itself, so that the remainder can be a hair below zero.
    parts["other"] = max(0.0, sum(answer.decode_seconds for answer in answers) - sum(parts.values()))
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def prompt_table(answers: Sequence[Answer], comparisons: Comparisons) -> pd.DataFrame:
    """One row a method, prompt, turn and temperature: medians, token ids, rounds and the comparison."""
    return pd.DataFrame([_prompt_row(answer, comparisons.get(answer.key)) for answer in answers])


def _prompt_row(answer: Answer, comparison: Comparison | None) -> dict[str, Any]:
    divergence = comparison.divergence if comparison else None
    return {
        "method": answer.key.method,
        "task": answer.key.task,
        "prompt_id": answer.key.prompt_id,
        "turn": answer.key.turn,
        "temperature": answer.key.temperature,
        "repeats": answer.repeats,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "prefill_seconds": answer.prefill_seconds,
        "decode_seconds": answer.decode_seconds,
        "draft_seconds": answer.draft_seconds,
        "verify_seconds": answer.verify_seconds,
        "accept_seconds": answer.accept_seconds,
        "cache_seconds": answer.cache_seconds,
        "repeat_spread": answer.spread,
        "repeatable": answer.repeatable,
        "rounds": len(answer.rounds.produced),
        "tau": mean_acceptance_length([answer.rounds]),
        "acceptance_lengths": list(answer.rounds.produced),
        "accepted_drafts": list(answer.rounds.accepted),
        "drafted_depths": list(answer.rounds.depth),
        "token_ids": list(answer.token_ids),
        "lossless": comparison.outcome.value if comparison else None,
        "diverges_at": divergence.index if divergence else None,
        "logit_gap": divergence.gap if divergence else None,
    }
