"""Tune the draft tree for this machine by measured speed; the same command goes on where it was stopped."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli import choose_device, read_settings, stage_parser
from eagle3 import paths
from eagle3.config import Settings
from eagle3.provenance import fingerprint_code, write_json
from eagle3.tracking import TrackedRun, Tracker

if TYPE_CHECKING:
    from eagle3.tuning.finalists import Outcome
    from eagle3.tuning.study import Record

RESULTS = paths.REPORTS / "sweep.json"
BEST = paths.REPORTS / "best_params.yaml"
EVALUATION = paths.REPORTS / "evaluation.json"
FOLDER = paths.RUNS / "sweep"


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
    command = shlex.join(["python", "experiments/sweep.py", *sys.argv[1:]])
    return {"command": command, **fingerprint_code(paths.REPORTS.resolve().parent)}


def preview(settings: Settings, arguments: Namespace) -> str:
    """The text of --dry-run or --what-if."""
    from eagle3.tuning import preview, setup
    from eagle3.tuning.study import Study
    from eagle3.tuning.workbench import task_prompts

    space = setup.make_space(settings)
    study = Study.read(arguments.study, arguments.storage, space)
    records = study.records() if study is not None else []
    if arguments.what_if:
        return preview.describe_other_machine(records, space, *arguments.what_if)
    wanted = settings.sweep
    first = (
        setup.grid_trials(settings, space)
        if arguments.sampler == "grid"
        else setup.first_trials(settings, space)
    )
    prompts = task_prompts(paths.TASKS, wanted.tasks, "tuning", wanted.prompts_per_task)
    answers = wanted.repeats * sum(len(prompt.turns) for prompt in prompts)
    seconds = preview.expected_trial_seconds(records, EVALUATION, answers, wanted.max_new_tokens)
    return preview.describe_plan(space, first[:10], arguments.trials, records, prompts, seconds)


def sweep(settings: Settings, arguments: Namespace, tracker: Tracker, run: TrackedRun) -> "Outcome | None":
    """Run the trials, measure the best again, write the results; the trials' part is written in any case."""
    from eagle3.tuning import setup
    from eagle3.tuning.best import sglang_flags, write_best
    from eagle3.tuning.figures import write_figures
    from eagle3.tuning.finalists import choose_finalists
    from eagle3.tuning.results import sweep_results, trial_row
    from eagle3.tuning.runner import Plan, Runner
    from eagle3.tuning.study import Study, ranked, timing_lock

    seed = settings.seed if arguments.seed is None else arguments.seed
    space = setup.make_space(settings)
    first = (
        setup.grid_trials(settings, space)
        if arguments.sampler == "grid"
        else setup.first_trials(settings, space)
    )
    marks, made_by = setup.fingerprint(settings), origin()
    folder = FOLDER / arguments.study
    folder.mkdir(parents=True, exist_ok=True)
    with timing_lock():
        bench = setup.load_workbench(settings, choose_device())
        workload = setup.tuning_workload(settings, bench)
        identity = setup.identity_of(settings, space, workload, marks)
        study = Study.open(arguments.study, arguments.storage, space, identity, arguments.sampler, seed)
        for number in study.revive():
            print(f"trial {number} was killed; it is run again")
        run.log_tags({"study": arguments.study, "sampler": arguments.sampler})

        def track_trial(record: "Record") -> None:
            row = trial_row(record, seed)
            name = space.label(record.configuration) if record.configuration is not None else ""
            with tracker.run("sweep", f"trial {record.number}: {name}", parent=run) as child:
                child.log_params({**(row["params"] or {}), "source": row["source"]})
                child.log_metrics(
                    {key: value for key, value in row.items() if isinstance(value, int | float)}
                )
                child.log_metrics(
                    {f"round_ms.{key}": value for key, value in (row["round_ms"] or {}).items()}
                )
                child.log_tags({"state": row["state"], "reason": row["reason"], "study": arguments.study})

        plan = Plan(arguments.trials, arguments.timeout, settings.sweep.early_stop, seed)
        runner = Runner(study, workload, bench.vanilla(), bench.decoder, plan, on_trial=track_trial)
        runner.enqueue(first)
        outcome = None
        try:
            runner.run()
            defaults = setup.default_configurations(settings, space)
            ranking = ranked(study.records())
            if ranking:
                finalists = choose_finalists(ranking, defaults, space, settings.sweep.held_out.finalists)
                outcome = setup.measure_finalists(
                    settings, bench, finalists, marks, folder / "held_out", made_by
                )
        finally:
            results = sweep_results(study.records(), space, identity, seed, outcome, made_by)
            write_json(RESULTS, results)
            run.log_artifact(RESULTS)
            for figure in write_figures(results, folder / "figures"):
                run.log_artifact(figure, "figures")
    if outcome is not None and outcome.winner is not None:
        configuration = outcome.winner.configuration
        family = settings.drafts[configuration.draft].family
        flags = sglang_flags(configuration, family, paths.DRAFTS / configuration.draft)
        write_best(BEST, outcome, flags, marks, made_by["command"])
        run.log_artifact(BEST)
        print(f"\nfor SGLang: {flags}\nwritten to {BEST}")
    return outcome


def main() -> None:
    arguments = options().parse_args()
    settings = read_settings(arguments.params)
    if arguments.dry_run or arguments.what_if:
        try:
            print(preview(settings, arguments))
        except ValueError as error:
            sys.exit(str(error))
        return
    tracker = Tracker.open(settings)
    try:
        with tracker.run("sweep", f"sweep {arguments.study}") as run:
            outcome = sweep(settings, arguments, tracker, run)
            if outcome is not None:
                track_outcome(run, outcome)
    except KeyboardInterrupt:
        sys.exit(f"stopped; {RESULTS} has the trials so far, and the same command goes on")
    if outcome is None:
        sys.exit(
            "no trial was measured in full, so that there is nothing to choose from; allow more --trials"
        )


def track_outcome(run: TrackedRun, outcome: "Outcome") -> None:
    """Print and log the held-out rows and what follows from them."""
    for row in outcome.rows:
        interval = bounds(row)
        kind = "tuned" if row["tuned"] else "default"
        print(f"{row['name']:<40} {kind:<8} {row['speedup']:.2f}x {interval}  tau {row['tau'] or 0:.2f}")
    print(outcome.summary)
    best = outcome.rows[0]
    keys = ("speedup", "speedup_low", "speedup_high", "tau")
    run.log_metrics({f"held_out.{key}": best[key] for key in keys})
    run.log_tags({"summary": outcome.summary, "beats_default": str(outcome.beats_default).lower()})


def bounds(row: Mapping[str, Any]) -> str:
    """ "[1.20, 1.31]", or nothing where there is no interval."""
    if row["speedup_low"] is None or row["speedup_high"] is None:
        return ""
    return f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"


if __name__ == "__main__":
    main()
