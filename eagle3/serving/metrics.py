"""What served answers say: latency, throughput and acceptance, by this project's definitions.

SGLang's own `spec_accept_length` is completion tokens / verifications and counts the prefill's token; the tau
here does not (see `measure.acceptance`). Both engines' counters are compared with what the answers add up to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from eagle3.measure.acceptance import Rounds, conditional_acceptance, mean_acceptance_length
from eagle3.serving.client import Streamed
from eagle3.serving.engines import Engine

# The part by which SGLang's average over whole lines of its log may differ from that of all verifications.
_AVERAGE_TOLERANCE = 0.1


def rounds_of(answer: Streamed, prompt_tokens: int, num_steps: int) -> Rounds:
    """The verification rounds of an answer that was decoded with a draft.

    SGLang tells their number and a histogram of their accepted drafts, before clipping at the end of the
    answer. Where the pieces of the stream are fewer, because some came together, the rounds are made of
    these, the longest first: their number and sums are right, and their order is lost. vLLM tells the
    accepted drafts round by round, unclipped, where it was started for that. Else the rounds are the pieces,
    and their accepted drafts the tokens less the bonus token.
    """
    produced, verifications = answer.produced, answer.meta.get("spec_verify_ct")
    if in_order := answer.meta.get("per_step_accepted"):
        beyond = sum(in_order) + len(in_order) - sum(produced)  # what the end of the answer cut off
        if 0 <= beyond <= in_order[-1]:
            lengths = (*(count + 1 for count in in_order[:-1]), in_order[-1] + 1 - beyond)
            return Rounds(lengths, tuple(in_order), (num_steps,) * len(lengths), prompt_tokens)
    histogram: Sequence[int] = answer.meta.get("spec_correct_drafts_histogram") or ()
    told = sorted((number for number, count in enumerate(histogram) for _ in range(count)), reverse=True)
    tokens = sum(produced)
    if verifications is None or verifications == len(produced):
        accepted = [count - 1 for count in produced]
        beyond = sum(told) - sum(accepted)
        if len(told) == len(accepted) and accepted and beyond > 0:
            accepted[-1] += beyond  # the end of the answer cut them off
    elif len(told) == verifications and 0 <= sum(told) + verifications - tokens <= told[0]:
        accepted = told
        # What the end cut off is of one round, which the longest can only have been as long as.
        produced = (told[0] + 1 - (sum(told) + verifications - tokens), *(count + 1 for count in told[1:]))
    else:
        each, more = divmod(tokens, verifications)
        produced = tuple(each + (number < more) for number in range(verifications))
        accepted = [max(0, count - 1) for count in produced]
    return Rounds(produced, tuple(accepted), (num_steps,) * len(accepted), prompt_tokens)


def summarise(
    answers: Sequence[Streamed],
    prompt_tokens: Sequence[int],
    wall_seconds: float,
    num_steps: int | None,
) -> dict[str, Any]:
    """One row of metrics over all answers of one experiment at one level of concurrency.

    Args:
        prompt_tokens: of each answer's prompt.
        wall_seconds: from the first request to the last answer.
        num_steps: depth of the draft; None for vanilla, which has no acceptance.
    """
    first = [answer.time_to_first_token * 1000 for answer in answers]
    each = [
        answer.decode_seconds * 1000 / (len(answer.token_ids) - 1)
        for answer in answers
        if len(answer.token_ids) > 1
    ]
    tokens = sum(len(answer.token_ids) for answer in answers)
    row: dict[str, Any] = {
        "requests": len(answers),
        "tokens": tokens,
        "tokens_per_second": tokens / wall_seconds,
        "time_to_first_token_ms": _spread(first),
        "time_per_output_token_ms": _spread(each),
        "tau": None,
        "acceptance_by_depth": [],
    }
    if num_steps is not None:
        rounds = [
            rounds_of(answer, count, num_steps) for answer, count in zip(answers, prompt_tokens, strict=True)
        ]
        row["tau"] = mean_acceptance_length(rounds)
        row["acceptance_by_depth"] = [depth.rate for depth in conditional_acceptance(rounds)]
    return row


def reconcile(
    engine: Engine,
    answers: Sequence[Streamed],
    before: Mapping[str, float],
    after: Mapping[str, float],
    speculative: bool,
) -> dict[str, Any]:
    """The server's counters over a run beside what the answers add up to.

    A vLLM server that was not started for it tells no verifications by request: there the pieces of the
    streams are counted, which are fewer where a fast server's pieces arrive together.

    Args:
        speculative: whether the server has a draft, without which there are no verifications.
        before, after: `Client.prometheus` before the first and after the last answer.

    Returns:
        For each count its value by the "requests" and by the "server", and whether all are equal.
    """

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    counts: dict[str, tuple[float, float]] = {
        "generated tokens": (
            sum(len(answer.token_ids) for answer in answers),
            counted(f"{engine}:generation_tokens_total"),
        )
    }
    if speculative and engine == "sglang":
        counts["verifications"] = (
            sum(int(answer.meta.get("spec_verify_ct", 0)) for answer in answers),
            counted("sglang:spec_verify_calls_total"),
        )
    elif speculative:
        counts["verifications"] = (
            sum(answer.meta.get("num_spec_steps", len(answer.produced)) for answer in answers),
            counted("vllm:spec_decode_num_drafts_total"),
        )
        if all("num_accepted_draft_tokens" in answer.meta for answer in answers):
            counts["accepted drafts"] = (
                sum(answer.meta["num_accepted_draft_tokens"] for answer in answers),
                counted("vllm:spec_decode_num_accepted_tokens_total"),
            )
    return {
        **{name: {"requests": mine, "server": theirs} for name, (mine, theirs) in counts.items()},
        "agree": all(mine == theirs for mine, theirs in counts.values()),
    }


def reconcile_average(answers: Sequence[Streamed], server: float | None) -> dict[str, Any] | None:
    """SGLang's average of tokens a verification beside that of the answers; None where either is missing.

    Args:
        answers: all that the server has given since its start, the warm-up included.
        server: its avg_spec_accept_length. It grows at the lines of the server's log alone, so that the last
            verifications may be missing: that is what the tolerance is for.

    Returns:
        Both, their "difference", and whether they "agree". Neither clips at the end of an answer.
    """
    rounds = [rounds_of(answer, 0, 0) for answer in answers]
    verifications = sum(len(each.accepted) for each in rounds)
    if server is None or not verifications:
        return None
    mine = sum(sum(each.accepted) for each in rounds) / verifications + 1
    return {
        "requests": mine,
        "server": server,
        "difference": server - mine,
        "agree": abs(server - mine) <= _AVERAGE_TOLERANCE * mine,
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": median(values), "p95": float(np.percentile(values, 95))}
