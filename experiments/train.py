"""Train one draft on the target's answers; a run that was killed goes on from its last checkpoint.

On several GPUs: torchrun --nproc-per-node <GPUs> experiments/train.py <draft>.
"""

import json
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from cli import choose_device, read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.config import (
    ExternalModelSettings,
    ExternalSettings,
    IndependentSettings,
    Settings,
    TrainedSettings,
)
from eagle3.provenance import hash_stage_code, replacing, write_jsonl
from eagle3.tracking import Tracker

if TYPE_CHECKING:
    from eagle3.training.parallel import Processes


def write_history(lines: Sequence[str], name: str) -> None:
    """The training's curve for the report and for `dvc plots`, without what differs from run to run."""
    rows = [json.loads(line) for line in lines]
    kept = [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]
    write_jsonl(paths.TRAINING / f"{name}.jsonl", kept)
    with replacing(paths.TRAINING / f"{name}.csv") as temporary:
        pd.DataFrame(kept, columns=["step", "loss", "lr", "gradient_norm"]).to_csv(temporary, index=False)


def take(settings: Settings, name: str, draft: ExternalSettings | ExternalModelSettings) -> None:
    """Bring in a draft that was trained elsewhere; there is no curve to show."""
    from eagle3.models.checkpoint import import_draft
    from eagle3.models.independent import import_independent
    from eagle3.models.target import Target
    from eagle3.sources import fetch, hub_commit

    target = Target.load(paths.TARGET, compiled=False)
    try:
        if isinstance(draft, ExternalModelSettings):
            import_independent(draft.source, paths.DRAFTS / name, target, draft.file)
        else:
            folder = fetch(draft.source)
            origin = {"source": draft.source, "commit": hub_commit(folder)}
            import_draft(folder, paths.DRAFTS / name, target, origin)
    except ValueError as error:
        raise ValueError(f"drafts.{name}: {error}") from None
    write_history([], name)
    with Tracker.open(settings).run("train", name, method=name) as run:
        run.log_params({"draft": draft.model_dump(mode="json")})
        run.log_artifact(paths.DRAFTS / name, "checkpoint")
    print(f"{paths.DRAFTS / name}: taken from {draft.source}")


def _ignore(measured: dict[str, float], step: int) -> None:
    """What a process that is not the first does with its measurements."""


def train(settings: Settings, name: str, draft: TrainedSettings, processes: "Processes", device: str) -> None:
    """Train a draft; what it does is written and tracked by the first process."""
    from eagle3.training.run import TrainingData, train_draft
    from eagle3.training.trainer import METRICS

    wanted = settings.train
    if isinstance(draft, IndependentSettings) and draft.token_budget is not None:
        wanted = wanted.model_copy(update={"token_budget": draft.token_budget})
    data = TrainingData.load(settings, device)
    folder = paths.RUNS / "train" / name
    code = {"code": hash_stage_code("train")}
    out = paths.DRAFTS / name
    if not processes.first:
        train_draft(data, draft, wanted, settings.seed, code, folder, out, _ignore, processes)
        return
    tracker = Tracker.open(settings)
    with tracker.run("train", name, method=name) as run:
        run.log_params({"draft": draft.model_dump(mode="json")})
        run.log_dataset("regenerated", paths.REGENERATED, "training")
        metrics = folder / METRICS
        before_a_kill = set(metrics.read_text(encoding="utf-8").splitlines()) if metrics.is_file() else set()
        with run.metric_buffer() as log:
            result = train_draft(data, draft, wanted, settings.seed, code, folder, out, log, processes)
        lines = metrics.read_text(encoding="utf-8").splitlines()
        run.log_history(json.loads(line) for line in lines if line in before_a_kill)
        write_history(lines, name)
        run.log_artifact(paths.DRAFTS / name, "checkpoint")
    shutil.rmtree(folder)  # only now: until here a killed run goes on from it
    print(
        f"{paths.DRAFTS / name}: {result.tokens} tokens in {result.steps} steps; simulated acceptance length "
        f"{result.acceptance_length:.2f} at step {result.best_step}"
    )


def main() -> None:
    parser = stage_parser(__doc__)
    parser.add_argument("draft", help="the name of the draft in params.yaml, such as eagle3")
    arguments = parser.parse_args()
    settings = read_settings(arguments.params)
    if arguments.draft not in settings.drafts:
        parser.error(f"draft {arguments.draft!r} is unknown: choose from {', '.join(settings.drafts)}")
    name, draft = arguments.draft, settings.drafts[arguments.draft]
    from eagle3.training.parallel import started_by_torchrun

    with started_by_torchrun(choose_device()) as (processes, device):
        if not isinstance(draft, ExternalSettings | ExternalModelSettings):
            train(settings, name, draft, processes, device)
        elif processes.first:
            take(settings, name, draft)


if __name__ == "__main__":
    run_in_words(main)
