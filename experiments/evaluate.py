"""Measure every method against vanilla on the held-out prompts, interleaved in one process."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cli import choose_device, read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.config import Settings
from eagle3.provenance import describe_run, fingerprint_machine, hash_tree, write_json
from eagle3.tracking import TrackedRun, Tracker

if TYPE_CHECKING:
    from eagle3.tuning.best import BestParameters

# The row of what experiments/sweep.py found.
TUNED = "tuned"
# Of a result, what is compared between runs by `dvc metrics` and `dvc exp show`.
HEADLINE = ("tau", "speedup", "speedup_low", "speedup_high", "end_to_end_speedup", "tokens_per_second")


def measure(settings: Settings, stack: ExitStack) -> dict[str, Any]:
    """Evaluate as params.yaml says; returns what evaluation.json holds. `stack` ends what was started."""
    import torch

    from eagle3.measure.bench import Bench, describe_drafting, evaluated_target, rivals
    from eagle3.measure.bound import measure_bound
    from eagle3.measure.prompts import task_prompts
    from eagle3.measure.settings import EvaluationSettings
    from eagle3.serving.bench import ServedBench

    wanted = settings.evaluate
    target = evaluated_target(wanted, choose_device())
    best = tuned_parameters(settings, torch.get_num_threads())
    journal = paths.RUNS / "evaluation.jsonl"
    costs = paths.RUNS / "adaptive_costs.json"
    if not journal.exists():
        costs.unlink(missing_ok=True)  # a run that goes on keeps its trees; a new one measures their costs
    bench = Bench(target, paths.DRAFTS, getattr(torch, wanted.draft_dtype), costs)
    if wanted.engine != "native":
        together = ["vanilla", *(method.name for method in wanted.methods), *([TUNED] if best else [])]
        bench = ServedBench.start(settings, wanted.engine, target, stack, together)
    decoders = [bench.vanilla(), *(bench.decoder(method) for method in wanted.methods)]
    drafting = {method.name: describe_drafting(method) for method in wanted.methods}
    methods = {method.name: method.model_dump(mode="json", exclude={"name"}) for method in wanted.methods}
    drafts = dict.fromkeys(wanted.draft_names)
    if best is not None:
        decoders.append(bench.tuned(best.configuration, TUNED))
        drafting[TUNED] = best.configuration.tree
        methods[TUNED] = best.configuration.as_dict()
        drafts[best.configuration.draft] = None
    return bench.evaluate(
        decoders,
        task_prompts(paths.TASKS, wanted.tasks, "held_out", wanted.prompts_per_task),
        EvaluationSettings(
            max_new_tokens=wanted.max_new_tokens,
            dtype=wanted.dtype,
            temperatures=wanted.temperatures,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            repeats=wanted.repeats,
            on_failure=wanted.on_failure,
            seed=settings.seed,
        ),
        machine=fingerprint_machine(),
        subject={
            "target": hash_tree(paths.TARGET),
            "drafts": {name: hash_tree(paths.DRAFTS / name) for name in drafts},
            "draft_dtype": wanted.draft_dtype,
            "methods": methods,
            "threads": torch.get_num_threads(),
            "device": str(target.device),
            **bench.describe(),
        },
        reports=paths.REPORTS,
        journal=journal,
        origin={
            **describe_run(paths.REPORTS.resolve().parent, "dvc repro evaluate"),
            "adaptive_costs_ms": bench.costs,
            "bound": measure_bound(target) if wanted.engine == "native" else None,
        },
        trees=drafting,
        pairs=rivals(wanted.methods, bench.families(wanted.methods)),
    )


def tuned_parameters(settings: Settings, threads: int) -> "BestParameters | None":
    """What a sweep found for this machine and these drafts; says why where there is none to use."""
    from eagle3.tuning.best import read_best
    from eagle3.tuning.setup import fingerprint

    if not paths.BEST.is_file():
        return None
    if settings.sweep.engine != settings.evaluate.engine:
        print(f"no tuned row: the sweep's engine is {settings.sweep.engine}")
        return None
    if settings.sweep.batch_size > 1:
        print(f"no tuned row: the sweep tunes batches of {settings.sweep.batch_size}, not one request")
        return None
    try:
        best = read_best(paths.BEST, fingerprint(settings))
    except ValueError as error:
        print(f"no tuned row: {error}")
        return None
    if not best.tuned:
        print(f"no tuned row: the winner of {paths.BEST} is a default tree, {best.name}")
        return None
    if best.configuration.threads not in (0, threads):
        print(
            f"no tuned row: {paths.BEST} has {best.configuration.threads} threads; set evaluate.threads to it"
        )
        return None
    return best


def row_name(result: dict[str, Any]) -> str:
    """A method's name, with the temperature where it is not greedy."""
    temperature = result["temperature"]
    return f"{result['method']}-t{temperature:g}" if temperature else str(result["method"])


def speedup_text(result: dict[str, Any]) -> str:
    """ "1.57x [1.45, 1.65]"; intervals need several prompts, a speedup a second token."""
    value, low, high = (result[key] for key in ("speedup", "speedup_low", "speedup_high"))
    if value is None:
        return "no speedup"
    return f"{value:.2f}x" if low is None or high is None else f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def track(run: TrackedRun, tracker: Tracker, report: dict[str, Any]) -> None:
    """One child run a method, with metrics of equal names; those of a task stand behind its name."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in report["results"]:
        rows.setdefault(row_name(result), []).append(result)
    for name, results in rows.items():
        with tracker.run("evaluate", name, parent=run, method=results[0]["method"]) as child:
            child.log_params({key: results[0][key] for key in ("method", "temperature", "dtype", "tree")})
            for result in results:
                prefix = "" if result["task"] == "all" else f"{result['task']}."
                numbers = {key: value for key, value in result.items() if not isinstance(value, list)}
                child.log_metrics(
                    {prefix + key: value for key, value in numbers.items() if key != "temperature"}
                )
                child.log_history(
                    {"step": depth, f"{prefix}acceptance_by_depth": rate}
                    for depth, rate in enumerate(result["acceptance_by_depth"])
                )
    run.log_tags({"trustworthy": str(report["verdict"]["trustworthy"]).lower()})
    run.log_dataset("tasks", paths.TASKS, "evaluation")
    for file in ("evaluation.json", "per_prompt.parquet", "metrics.json"):
        run.log_artifact(paths.REPORTS / file)


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    from eagle3.measure.lock import timing_lock

    with ExitStack() as stack:
        stack.enter_context(timing_lock())
        report = run_and_track(settings)
    for result in (result for result in report["results"] if result["task"] == "all"):
        rate = f"{result['tokens_per_second']:.1f}" if result["tokens_per_second"] is not None else "no"
        print(f"{row_name(result):<24} {speedup_text(result)}  tau {result['tau'] or 0:.2f}  {rate} tokens/s")
    print(report["verdict"]["summary"])


def run_and_track(settings: Settings) -> dict[str, Any]:
    """Measure as params.yaml says, with a run in MLflow for the evaluation and one for each method."""
    tracker = Tracker.open(settings)
    with tracker.run("evaluate", "evaluation") as run:
        with ExitStack() as stack:
            report = measure(settings, stack)
        overall = {row_name(result): result for result in report["results"] if result["task"] == "all"}
        headlines = {name: {key: result[key] for key in HEADLINE} for name, result in overall.items()}
        write_json(paths.METRICS, headlines)
        track(run, tracker, report)
    return report


if __name__ == "__main__":
    run_in_words(main)
