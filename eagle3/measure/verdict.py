"""The verdict on an evaluation: what in it can be believed, in sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from eagle3.measure.protocol import VANILLA, VANILLA_AGAIN
from eagle3.measure.statistics import misses_by_chance
from eagle3.measure.summary import ALL_TASKS

# A draft that is not the target's, or is run in the wrong mode, is accepted next to never (tau = 1).
LOWEST_PLAUSIBLE_TAU = 1.2
# Of the rounds: a method that drafts in fewer is held back by that, and not by wrong drafts.
SELDOM = 0.5
# Shares of the machine's CPU time that other processes used while measuring.
BUSY_SHARE = 0.05
# Mean (max - min) / median of a cell's repeats.
NOISY_SPREAD = 0.10
# Fewer prompts than this give a bootstrap too few different resamples for its stated coverage.
FEW_PROMPTS = 10
RECOMMENDED_REPEATS = 3


class Level(StrEnum):
    """What a check says about the evaluation as a whole."""

    OK = "ok"
    NOTE = "note"  # a result worth saying, which puts nothing in doubt
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Check:
    """One thing checked, with a sentence that stands by itself."""

    name: str
    level: Level
    sentence: str


@dataclass(frozen=True)
class Circumstances:
    """What happened around the measurement."""

    repeats: int
    foreign_cpu_mean: float
    foreign_cpu_max: float
    excluded: Mapping[str, str]  # "task/prompt id" -> error
    processes: int
    loads: Mapping[str, Any]  # "start" and "end"


def judge(results: Sequence[Mapping[str, Any]], circumstances: Circumstances) -> dict[str, Any]:
    """The verdict: `trustworthy` (no check failed), `summary`, `checks`, `noise` and `load`."""
    overall = [row for row in results if row["task"] == ALL_TASKS]
    checks = [
        *(_check_aa(row) for row in overall if row["method"] == VANILLA_AGAIN),
        *_check_aa_parts([row for row in results if row["method"] == VANILLA_AGAIN]),
        _check_losslessness(overall),
        *_check_tau(overall),
        *_check_slower(overall),
        *_check_noise(overall, circumstances),
        _check_load(circumstances),
        *_check_amount(results, circumstances),
        *_check_exclusions(circumstances),
        *_check_repeatable(overall),
    ]
    counts = {level: sum(check.level is level for check in checks) for level in Level}
    return {
        "trustworthy": counts[Level.FAILURE] == 0,
        "summary": _summary(counts),
        "checks": [asdict(check) for check in checks],
        "noise": {
            "repeat_spread": _spread(overall),
            "aa": [
                {
                    "temperature": row["temperature"],
                    **{key: row[key] for key in ("speedup", "speedup_low", "speedup_high")},
                }
                for row in overall
                if row["method"] == VANILLA_AGAIN
            ],
        },
        "load": {
            **circumstances.loads,
            "foreign_cpu_mean": circumstances.foreign_cpu_mean,
            "foreign_cpu_max": circumstances.foreign_cpu_max,
        },
        "processes": circumstances.processes,
        "excluded_prompts": dict(circumstances.excluded),
    }


def reservations(verdict: Mapping[str, Any]) -> list[str]:
    """The sentences of a verdict's failed checks and warnings, failures first."""
    levels = (Level.FAILURE, Level.WARNING)
    return [check["sentence"] for level in levels for check in verdict["checks"] if check["level"] == level]


def _summary(counts: Mapping[Level, int]) -> str:
    if counts[Level.FAILURE]:
        return f"Do not trust these numbers: {counts[Level.FAILURE]} of the checks failed."
    if counts[Level.WARNING]:
        noun = "check warns" if counts[Level.WARNING] == 1 else "checks warn"
        return f"These numbers can be trusted with the reservations below: {counts[Level.WARNING]} {noun}."
    return "These numbers can be trusted: all checks passed."


def _check_aa(row: Mapping[str, Any]) -> Check:
    """Vanilla against itself over all tasks.

    An interval of 95 % misses 1 in one of twenty runs with nothing wrong, so that a miss alone warns; a
    distance from 1 of more than its whole width is no chance.
    """
    start = f"Vanilla against itself at temperature {row['temperature']:g}"
    low, high = row["speedup_low"], row["speedup_high"]
    if low is None:
        return Check("a/a", Level.WARNING, f"{start} was measured on too few prompts for an interval.")
    width, distance = high - low, abs(row["speedup"] - 1.0)
    gives = f"{start} gives {row['speedup']:.3f} (95 % interval {low:.3f} to {high:.3f})"
    if low <= 1.0 <= high:
        seen = f"differences below ±{width / 2:.1%} cannot be seen"
        return Check("a/a", Level.OK, f"{gives}, which contains 1; {seen}.")
    missed = (
        f"{gives}, which does not contain 1: the protocol sees a difference of {distance:.1%} where there"
    )
    if distance > width:
        return Check("a/a", Level.FAILURE, f"{missed} is none. Measure again on a quiet machine.")
    sentence = f"{missed} is none, as 1 of 20 runs does by chance. Smaller differences are no result."
    return Check("a/a", Level.WARNING, sentence)


def _check_aa_parts(again: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Vanilla against itself by task and end to end: more misses of 1 than chance allows warn."""
    tested, missed = 0, []
    for row in again:
        by_task = row["task"] != ALL_TASKS
        place = f"{row['task'] if by_task else 'all tasks'} at temperature {row['temperature']:g}"
        for name, key in (("decoding", "speedup"), ("end to end", "end_to_end_speedup")):
            low, high = row[f"{key}_low"], row[f"{key}_high"]
            checked_above = not by_task and key == "speedup"
            if low is None or checked_above:
                continue
            tested += 1
            if not low <= 1.0 <= high:
                missed.append(f"{place}, {name}: {low:.3f} to {high:.3f}")
    if not tested:
        return []
    counted = f"{len(missed)} of {tested} intervals miss 1"
    listed = f": {'; '.join(missed)}" if missed else ""
    if len(missed) <= misses_by_chance(tested):
        sentence = f"Vanilla against itself in parts: {counted}, as chance allows{listed}."
        return [Check("a/a in parts", Level.OK, sentence)]
    sentence = (
        f"Vanilla against itself in parts: {counted}, more than chance allows, so that intervals of their "
        f"kind are too narrow to compare methods by{listed}."
    )
    return [Check("a/a in parts", Level.WARNING, sentence)]


def _check_losslessness(overall: Sequence[Mapping[str, Any]]) -> Check:
    failed = {row["method"]: row["lossless"]["failures"] for row in overall if row["lossless"]["failures"]}
    if failed:
        listed = ", ".join(f"{method} {count}" for method, count in failed.items())
        return Check(
            "lossless",
            Level.FAILURE,
            f"Outputs that are not the target's own: {listed}. A method that changes tokens has no speedup.",
        )
    # The A/A arm is no method: that vanilla equals itself says nothing about them.
    compared = [
        row["lossless"]
        for row in overall
        if row["method"] not in (VANILLA, VANILLA_AGAIN) and row["lossless"]["compared"]
    ]
    if not compared:
        return Check(
            "lossless",
            Level.WARNING,
            "No output was compared: only greedy outputs can be, and temperature 0 was not measured.",
        )
    ties = sum(counts["near_ties"] for counts in compared)
    rest = f", except {ties} that part at a near tie of the target's logits" if ties else ""
    who = f"Each of the {len(compared)} methods" if len(compared) > 1 else "The method"
    answers = f"{compared[0]['compared']} greedy answers"
    return Check("lossless", Level.OK, f"{who} gives vanilla's {answers} token by token{rest}.")


def _check_tau(overall: Sequence[Mapping[str, Any]]) -> list[Check]:
    checks = []
    for row in overall:
        if row["tau"] is not None and row["rounds"] and row["tau"] < LOWEST_PLAUSIBLE_TAU:
            sentence = (
                f"{row['method']} at temperature {row['temperature']:g} has a mean acceptance length of "
                f"{row['tau']:.2f}, below {LOWEST_PLAUSIBLE_TAU}: {_low_tau_cause(row)}"
            )
            checks.append(Check("tau", Level.WARNING, sentence))
    return checks


def _low_tau_cause(row: Mapping[str, Any]) -> str:
    """Why hardly more than one token comes out of a round: no drafts, or wrong ones."""
    reached = row["acceptance_reached"]
    drafted, rounds = reached[0] if reached else 0, row["rounds"]
    if drafted < SELDOM * rounds:
        return (
            f"it drafts in {drafted:,} of {rounds:,} rounds only, as prompt lookup does where text repeats "
            "little."
        )
    return (
        "drafts are hardly ever right. A trained draft has to belong to this target, with these captured "
        "layers and this vocabulary, and to run in its own mode; prompt lookup finds only what the context "
        "repeats."
    )


def _check_slower(overall: Sequence[Mapping[str, Any]]) -> list[Check]:
    """A result and no doubt about it: a method may be slower, and is then to be named."""
    slower = [
        f"{row['method']} ({row['speedup']:.2f}× at temperature {row['temperature']:g})"
        for row in overall
        if row["slower_than_vanilla"]
    ]
    if not slower:
        return []
    return [Check("slower", Level.NOTE, f"Slower than vanilla on this machine: {', '.join(slower)}.")]


def _spread(overall: Sequence[Mapping[str, Any]]) -> float:
    """Mean over vanilla's rows of the spread of repeats."""
    spreads = [row["repeat_spread"] for row in overall if row["method"] == VANILLA]
    return sum(spreads) / len(spreads)


def _check_noise(overall: Sequence[Mapping[str, Any]], circumstances: Circumstances) -> list[Check]:
    if circumstances.repeats == 1:
        return []
    spread = _spread(overall)
    sentence = f"Repeats of one vanilla generation spread over {spread:.1%} of their median"
    if spread > NOISY_SPREAD:
        advice = "this machine is noisy; more repeats or prompts help"
        return [Check("noise", Level.WARNING, f"{sentence}: {advice}.")]
    return [Check("noise", Level.OK, f"{sentence}.")]


def _check_load(circumstances: Circumstances) -> Check:
    sentence = (
        f"Other processes used {circumstances.foreign_cpu_mean:.1%} of the CPU time while measuring "
        f"(load average {circumstances.loads['start']['load_average'][0]:.1f} at the start, "
        f"{circumstances.loads['end']['load_average'][0]:.1f} at the end)"
    )
    if circumstances.foreign_cpu_mean > BUSY_SHARE:
        return Check("load", Level.WARNING, f"{sentence}: close them and measure again for clean times.")
    return Check("load", Level.OK, f"{sentence}.")


def _check_amount(results: Sequence[Mapping[str, Any]], circumstances: Circumstances) -> list[Check]:
    checks = []
    total = min(row["prompts"] for row in results if row["task"] == ALL_TASKS)
    by_task = min((row["prompts"] for row in results if row["task"] != ALL_TASKS), default=total)
    for prompts, where in ((total, ""), (by_task, " of a task")):
        if prompts < FEW_PROMPTS and not (where and by_task == total):
            sentence = (
                f"Only {prompts} prompts{where} were measured: intervals from fewer than {FEW_PROMPTS} are "
                "too narrow."
            )
            checks.append(Check(f"prompts{where}", Level.WARNING, sentence))
    if circumstances.repeats < RECOMMENDED_REPEATS:
        sentence = (
            f"Repeats of each generation: {circumstances.repeats}. A median keeps a disturbed one out from "
            f"{RECOMMENDED_REPEATS} on."
        )
        checks.append(Check("repeats", Level.WARNING, sentence))
    return checks


def _check_exclusions(circumstances: Circumstances) -> list[Check]:
    if not circumstances.excluded:
        return []
    listed = ", ".join(list(circumstances.excluded)[:5])
    more = f" and {len(circumstances.excluded) - 5} more" if len(circumstances.excluded) > 5 else ""
    sentence = (
        f"{len(circumstances.excluded)} prompt(s) failed and are left out for every method: {listed}{more}."
    )
    return [Check("excluded", Level.WARNING, sentence)]


def _check_repeatable(overall: Sequence[Mapping[str, Any]]) -> list[Check]:
    varying = sorted({row["method"] for row in overall if not row["repeatable"]})
    if not varying:
        return []
    sentence = f"Repeats of {', '.join(varying)} gave different tokens for the same prompt and seed."
    return [Check("repeatable", Level.WARNING, sentence)]
