"""Tune the draft tree for this machine by measured speed; the same command goes on where it was stopped."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cli import choose_device, read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.config import Settings
from eagle3.provenance import describe_run, script_command, write_json, write_text
from eagle3.tracking import TrackedRun, Tracker

if TYPE_CHECKING:
    from eagle3.tuning.finalists import Outcome
    from eagle3.tuning.setup import Session
    from eagle3.tuning.study import Record

RESULTS = paths.REPORTS / "sweep.json"
PREDICTIONS = paths.REPORTS / "sweep_predictions.csv"
BEST = paths.BEST
EVALUATION = paths.REPORTS / "evaluation.json"
FOLDER = paths.RUNS / "sweep"
# Of a held-out row.
BOUNDED = ("speedup", "speedup_low", "speedup_high", "tau")


def options() -> ArgumentParser:
    """The script's options."""
    parser = stage_parser(__doc__ or "")
    add = parser.add_argument
    add("--trials", type=int, default=50, help="measured trials wanted in the study, earlier ones included")
    add("--sampler", choices=("tpe", "gp", "grid"), default="tpe", help="what chooses the trials")
    add(
        "--storage",
        default=f"sqlite:///{paths.RUNS / 'sweep.db'}",
        help="database URL; machines of one kind can share",
    )
    add("--study", default="tree", help="name of the study in the storage")
    add("--seed", type=int, help="of the sampler; None: that of the settings")
    add("--timeout", type=float, help="seconds after which no trial begins")
    add("--dry-run", action="store_true", help="show what would be tried, and measure nothing")
    add(
        "--what-if",
        type=float,
        nargs=2,
        metavar=("TARGET_MS", "DRAFT_MS"),
        help="predict, from the trials so far, for a machine with these times of a forward and a draft step",
    )
    return parser


def origin() -> dict[str, Any]:
    """The command and the code that make a result."""
    return describe_run(paths.REPORTS.resolve().parent, script_command("experiments/sweep.py"))


def preview(settings: Settings, arguments: Namespace) -> str:
    """The text of --dry-run or --what-if."""
    from eagle3.tuning import preview, setup
    from eagle3.tuning.study import Study

    space = setup.make_space(settings)
    study = Study.read(arguments.study, arguments.storage, space)
    records, refusal = [], None
    if study is not None:
        records = study.records()
        refusal = study.refusal(setup.identity_of(settings, setup.fingerprint(settings)))
    if arguments.what_if:
        text = preview.describe_other_machine(records, space, *arguments.what_if)
        return (
            text if refusal is None else f"{refusal}\nThis is predicted from that study all the same:\n{text}"
        )
    if refusal is None:
        return plan_text(settings, arguments, records)
    return f"{refusal}\nThis is what another study would do:\n{plan_text(settings, arguments, [])}"


def plan_text(settings: Settings, arguments: Namespace, records: "list[Record]") -> str:
    """What a sweep would do that goes on from these records."""
    from eagle3.tuning import defaults, preview, setup

    space, wanted = setup.make_space(settings), settings.sweep
    prompts, held_out = setup.tuning_prompts(settings), setup.held_out_prompts(settings)
    answers = wanted.repeats * sum(len(prompt.turns) for prompt in prompts)
    trial = preview.expected_trial_seconds(records, EVALUATION, answers, wanted.max_new_tokens)
    finalists = len(setup.held_out_finalists(settings, space, [])) + wanted.held_out.finalists
    tokens = wanted.held_out.max_new_tokens * wanted.held_out.repeats
    tokens *= sum(len(prompt.turns) for prompt in held_out)
    token = preview.vanilla_token_seconds(records, EVALUATION)
    # Vanilla is measured twice beside them: the second time against itself.
    seconds = None if token is None else (finalists + 2) * tokens * token
    return preview.describe_plan(
        space,
        defaults.trials_to_enqueue(settings, space, arguments.sampler),
        arguments.trials,
        records,
        prompts,
        preview.Expected(trial, seconds),
        grid=arguments.sampler == "grid",
        finalists=finalists,
    )


def sweep(session: "Session", arguments: Namespace, tracker: Tracker) -> "Outcome | None":
    """Run the trials and measure the best again; what was measured is written and tracked in any case."""
    from eagle3.report.sweep_figures import write_figures
    from eagle3.tuning.predictions import Predictions
    from eagle3.tuning.results import held_out_results, sweep_results
    from eagle3.tuning.runner import Plan, Runner
    from eagle3.tuning.study import known_configurations

    folder, made_by, outcome = FOLDER / arguments.study, origin(), None
    plan = Plan(arguments.trials, arguments.timeout, session.settings.sweep.early_stop, session.settings.seed)
    with tracker.run("sweep", f"sweep {arguments.study}") as run:
        run.log_tags({"study": arguments.study, "sampler": arguments.sampler})
        runner = Runner(
            session.study,
            session.workload,
            session.bench.vanilla(),
            session.bench.decoder,
            plan,
            on_trial=lambda record: track_trial(tracker, run, session, record),
        )
        try:
            runner.run()
            if finalists := session.finalists():
                print(f"on held-out prompts: {', '.join(finalist.name for finalist in finalists)}")
                outcome = session.measure_finalists(finalists, folder / "held_out", made_by)
        finally:
            records = session.study.records()
            held_out = held_out_results(RESULTS, arguments.study, session.identity, outcome)
            predictions = Predictions.of(known_configurations(records))
            cost_model = predictions.summary(session.space)
            results = sweep_results(records, session.identity, plan.seed, held_out, cost_model, made_by)
            write_json(RESULTS, results)
            write_text(PREDICTIONS, predictions.table(session.space).to_csv(index=False, float_format="%.4f"))
            for path in (RESULTS, PREDICTIONS):
                run.log_artifact(path)
            for figure in write_figures(results, folder / "figures"):
                run.log_artifact(figure, "figures")
        if cost_model is not None and cost_model["median_relative_error"] is not None:
            error = 100 * cost_model["median_relative_error"]
            print(f"cost model: median error {error:.1f} %; every configuration's speedup: {PREDICTIONS}")
        if outcome is not None:
            conclude(tracker, run, session, outcome, made_by["command"])
    return outcome


def track_trial(tracker: Tracker, run: TrackedRun, session: "Session", record: "Record") -> None:
    """A run nested under the sweep's."""
    from eagle3.tuning.results import trial_row

    row = trial_row(record, session.settings.seed)
    name = session.space.label(record.configuration) if record.configuration is not None else ""
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
    parts = {f"round_ms.{key}": value for key, value in (row["round_ms"] or {}).items()}
    with tracker.run("sweep", f"trial {record.number}: {name}", parent=run) as child:
        child.log_params({**(row["params"] or {}), "source": row["source"]})
        child.log_metrics({**numbers, **parts})
        child.log_tags({"state": row["state"], "reason": row["reason"]})


def conclude(tracker: Tracker, run: TrackedRun, session: "Session", outcome: "Outcome", command: str) -> None:
    """Print and log the held-out rows and what follows from them; write the winner."""
    from eagle3.tuning.best import flags_note, winner_flags, write_best

    for row in outcome.rows:
        kind = "tuned" if row["tuned"] else "default"
        print(f"{row['name']:<44} {kind:<8} {row['speedup']:.2f}x {bounds(row)}  tau {row['tau'] or 0:.2f}")
        with tracker.run("sweep", f"held out: {row['name']}", parent=run) as child:
            child.log_params({key: row[key] for key in ("name", "tuned")})
            child.log_metrics({key: row[key] for key in (*BOUNDED, "prompts")})
    print(outcome.summary, *(f"- {reservation}" for reservation in outcome.reservations), sep="\n")
    run.log_tags({"summary": outcome.summary, "beats_default": str(outcome.beats_default).lower()})
    if outcome.winner is None:
        BEST.unlink(missing_ok=True)  # of an earlier sweep
        return
    run.log_metrics({f"held_out.{key}": outcome.row(outcome.winner)[key] for key in BOUNDED})
    configuration = outcome.winner.configuration
    engine = session.settings.sweep.engine
    flags = winner_flags(configuration, engine)
    write_best(BEST, outcome, engine, flags, session.marks, command)
    run.log_artifact(BEST)
    if note := flags_note(configuration):
        print(note)
    print(f"for {'vLLM' if engine == 'vllm' else 'SGLang'}: {flags}\nwritten to {BEST}")


def bounds(row: Mapping[str, Any]) -> str:
    """ "[1.20, 1.31]", or nothing where there is no interval."""
    if row["speedup_low"] is None or row["speedup_high"] is None:
        return ""
    return f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"


def main() -> None:
    arguments = options().parse_args()
    settings = read_settings(arguments.params)
    with ExitStack() as stack:
        if arguments.dry_run or arguments.what_if:
            print(preview(settings, arguments))
            return
        session = open_session(settings, arguments, stack)
        try:
            outcome = sweep(session, arguments, Tracker.open(settings))
        except KeyboardInterrupt:
            sys.exit(f"stopped; {RESULTS} has the trials so far, and the same command goes on")
    if outcome is None:
        sys.exit(
            "no trial was measured in full, so that there is nothing to choose from: allow more --trials"
        )


def open_session(settings: Settings, arguments: Namespace, stack: ExitStack) -> "Session":
    """The study with what it needs, holding the machine's timing lock as long as the stack is open."""
    from eagle3.measure.lock import timing_lock
    from eagle3.tuning.setup import Session

    stack.enter_context(timing_lock())
    FOLDER.mkdir(parents=True, exist_ok=True)
    seed = settings.seed if arguments.seed is None else arguments.seed
    return Session.open(
        settings, arguments.study, arguments.storage, arguments.sampler, seed, choose_device(), stack
    )


if __name__ == "__main__":
    run_in_words(main)
