"""A study from params.yaml to its file in reports/, every training a run in MLflow."""

from __future__ import annotations

from eagle3 import paths
from eagle3.config import Settings
from eagle3.measure.lock import timing_lock
from eagle3.provenance import hash_stage_code, write_json
from eagle3.studies.comparison import compare
from eagle3.studies.variants import ablation_variants, scaling_variants, train_variants
from eagle3.tracking import Tracker
from eagle3.training.run import TrainingData

VARIANTS = {"ablation": ablation_variants, "scaling": scaling_variants}


def run_study(settings: Settings, study: str, device: str) -> None:
    """Train the study's drafts, decode with all of them side by side, and write reports/<study>.json.

    A run that was killed goes on: drafts that are trained stay, a training goes on from its checkpoint, the
    measuring from its journal.
    """
    variants = VARIANTS[study](settings)
    folder, out = paths.RUNS / study, paths.REPORTS / f"{study}.json"
    data = TrainingData.load(settings, device)
    tracker = Tracker.open(settings)
    with tracker.run(study, study) as run:
        run.log_params({study: getattr(settings.studies, study).model_dump(mode="json")})
        run.log_dataset("regenerated", paths.REGENERATED, "training")
        with run.metric_buffer() as buffer:

            def log(name: str, measured: dict[str, float], step: int) -> None:
                buffer({f"{name}.{key}": value for key, value in measured.items()}, step)

            trained = train_variants(data, variants, settings.seed, hash_stage_code("train"), folder, log)
        command = f"dvc repro experiments/studies/dvc.yaml:study@{study}"
        with timing_lock():
            report = compare(settings, variants, trained, folder, device, command)
        write_json(out, report)
        run.log_artifact(out)
    for row in report["results"]:
        if row["task"] == "all":
            speed = f"{row['speedup']:.2f}" if row["speedup"] is not None else "-"
            print(
                f"{row['method']:<24} {row['train_tokens']:>9,} tokens  tau {row['tau'] or 0:.2f}  {speed}x"
            )
    print(f"{out} is written")
