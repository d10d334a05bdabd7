"""What a sweep tells without measuring: its space and expected time, and speedups on another machine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.measure.rendering import Prompt
from eagle3.tuning.cost_model import Costs
from eagle3.tuning.predictor import Predictor
from eagle3.tuning.runner import duration
from eagle3.tuning.space import Configuration, Space
from eagle3.tuning.study import Record, known_configurations, measured

# How many of the first trials are named.
_SHOWN = 10


@dataclass(frozen=True)
class Expected:
    """Seconds of one trial and of the whole second measurement; None where nothing is known."""

    trial: float | None
    held_out: float | None


def describe_plan(
    space: Space,
    first: Sequence[tuple[str, Configuration]],
    trials: int,
    records: Sequence[Record],
    prompts: Sequence[Prompt],
    expected: Expected,
    *,
    grid: bool = False,
    finalists: int,
) -> str:
    """The space, how many configurations it has, what is tried first, and how long it will take.

    Args:
        first: (who chose it, configuration); with `grid` all that will be tried.
        trials: measured trials wanted.
        records: of the study so far.
        prompts: of one trial.
        expected: how long things take.
        finalists: configurations of the second measurement.
    """
    done, answers = len(measured(list(records))), sum(len(prompt.turns) for prompt in prompts)
    configurations = list(space.configurations())
    chains = sum(configuration.topk == 1 for configuration in configurations)
    lines = [
        f"drafts            {', '.join(space.drafts)}",
        f"num_steps         1 to {space.max_num_steps}",
        f"topk              1 to {space.max_topk}",
        f"num_draft_tokens  2 to {space.max_num_draft_tokens}; num_steps + 1 for topk 1",
        f"draft_dtype       {', '.join(space.draft_dtypes)}",
        f"threads           {', '.join(str(number) if number else 'all' for number in space.threads)}",
        f"backends          {', '.join(space.backends)}",
        f"confidence        {', '.join(f'{value:g}' for value in space.confidences)}",
        f"{len(configurations)} feasible configurations, {chains} of them chains",
    ]
    left = max(0, trials - done)
    if grid:
        known = known_configurations(list(records))
        open_points = sum(configuration not in known for _, configuration in first)
        left = min(left, open_points)
        lines.append(f"the grid has {len(first)} of them, {len(first) - open_points} of which are measured")
    shown = ", ".join(f"{space.label(item)} ({name})" for name, item in first[:_SHOWN])
    lines += [
        f"first: {shown}",
        f"each trial: {len(prompts)} prompts with {answers} answers, and vanilla's beside them",
        f"measured so far: {done} of {trials} trials",
    ]
    if expected.trial is None:
        lines.append(f"{left} trials left; how long one takes shows after the first")
    else:
        lines.append(f"{left} trials left, about {duration(left * expected.trial)}")
    took = "" if expected.held_out is None else f", about {duration(expected.held_out)}"
    lines.append(f"then {finalists} configurations on held-out prompts{took}")
    return "\n".join(lines)


def expected_trial_seconds(
    records: Sequence[Record], evaluation: Path, answers: int, max_new_tokens: int
) -> float | None:
    """Of earlier trials, or else twice vanilla's time by an earlier evaluation; None without either."""
    spent = [record.seconds for record in measured(list(records)) if record.seconds is not None]
    if spent:
        return sum(spent) / len(spent)
    token = vanilla_token_seconds(records, evaluation)
    return None if token is None else 2 * answers * max_new_tokens * token


def vanilla_token_seconds(records: Sequence[Record], evaluation: Path) -> float | None:
    """Seconds of a token of vanilla by the trials, or else by an earlier evaluation; None without either."""
    found = [
        record.measurement.vanilla_seconds_per_token for record in records if record.measurement is not None
    ]
    if found:
        return sum(found) / len(found)
    if not evaluation.is_file():
        return None
    results = json.loads(evaluation.read_text(encoding="utf-8"))["results"]
    for row in results:
        if row["method"] == "vanilla" and row["task"] == "all":
            return 1 / float(row["tokens_per_second"])
    return None


def describe_other_machine(
    records: Sequence[Record], space: Space, target_ms: float, draft_ms: float, count: int = 10
) -> str:
    """The best trees where a target forward and a draft step take these times for any number of tokens.

    Raises:
        ValueError: for times that are not positive, or without trials to learn the draft's acceptance from.
    """
    if target_ms <= 0 or draft_ms <= 0:
        raise ValueError(f"--what-if {target_ms:g} {draft_ms:g}: give two times above 0, in milliseconds")
    here = Predictor.fit(known_configurations(list(records)))
    if not here.models:
        raise ValueError("--what-if needs the acceptance seen in trials: run at least three trials first")
    there = here.with_costs(Costs.flat(target_ms / 1000, draft_ms / 1000))
    lines = [
        f"with {target_ms:g} ms a target forward and {draft_ms:g} ms a draft step, predicted:",
        f"{'configuration':<16} {'speedup':>8} {'tau':>6} {'here':>6}",
    ]
    for item, model in there.ranked(space.configurations())[:count]:
        tau = model.acceptance.tau(item)
        lines.append(
            f"{space.label(item):<16} {model.speedup(item):>7.2f}x {tau:>6.2f} {here.speedup(item):>5.2f}x"
        )
    return "\n".join(lines)
