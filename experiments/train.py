"""Train one draft on the target's answers; a run that was killed goes on from its last checkpoint."""

import json
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from cli import choose_device, read_settings, stage_parser
from eagle3 import paths
from eagle3.config import DraftSettings, EagleSettings, Settings, TrainSettings
from eagle3.provenance import hash_stage_code, hash_tree, replacing, write_jsonl
from eagle3.tracking import Tracker

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3.data.rows import Row
    from eagle3.data.vocabulary import DraftVocabulary
    from eagle3.models.target import Target
    from eagle3.training.batches import Batch
    from eagle3.training.objective import Eagle3Objective, EagleObjective

# Tokens that the linear start of a draft is solved from.
START_TOKENS = 32768


def build_objective(
    target: "Target",
    vocabulary: "DraftVocabulary",
    draft: DraftSettings,
    train: TrainSettings,
    batches: Sequence["Batch"],
    seed: int,
) -> "EagleObjective | Eagle3Objective":
    """The draft at its start, solved from some batches, and what it is trained for."""
    from eagle3.models.draft import DraftConfig
    from eagle3.models.eagle import EagleModule
    from eagle3.models.eagle3 import Eagle3Module
    from eagle3.training.objective import Eagle3Objective, EagleObjective
    from eagle3.training.start import start_eagle, start_eagle3, state_scale

    embedding, head, kv_heads = target.embed_weight, target.lm_head_weight, draft.num_key_value_heads
    if isinstance(draft, EagleSettings):
        eagle = EagleModule(DraftConfig.for_target(target, draft.family, num_key_value_heads=kv_heads))
        start_eagle(eagle, target, batches, seed)
        tokens = vocabulary.draft_to_target()
        return EagleObjective(eagle, embedding, head, tokens, draft, train.prompt_loss)
    config = DraftConfig.for_target(
        target,
        draft.family,
        vocabulary.size,
        kv_heads,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
    )
    eagle3 = Eagle3Module(config)
    eagle3.set_vocabulary(vocabulary.draft_to_target())
    scale = state_scale(eagle3, batches)
    start_eagle3(eagle3, target, batches, scale, seed)
    return Eagle3Objective(eagle3, embedding, head, draft, train.prompt_loss, scale)


def start_batches(rows: Sequence["Row"], states: Callable[["Row"], "Tensor"], width: int) -> list["Batch"]:
    """Training rows of about START_TOKENS tokens, the same for every draft."""
    from eagle3.training.batches import make_batch, plan_batches

    train = [row for row in rows if row.split == "train"]
    chosen, tokens = [], 0
    for batch in plan_batches([len(row.token_ids) for row in train], 4096, "start"):
        if tokens < START_TOKENS:
            chosen.append(make_batch([train[index] for index in batch], states, width))
            tokens += chosen[-1].tokens
    return chosen


def training_data(settings: Settings) -> tuple[Sequence["Row"], Callable[["Row"], "Tensor"]]:
    """The regenerated rows, and where the hidden states of a row come from."""
    import torch

    from eagle3.data.hidden_states import OnlineStates
    from eagle3.data.rows import HiddenStates, read_rows
    from eagle3.models.target import Target

    rows = read_rows(paths.REGENERATED)
    if settings.train.hidden_states == "captured":
        captured = HiddenStates(paths.HIDDEN_STATES)
        return rows, lambda row: captured[row.id]
    dtype = getattr(torch, settings.regenerate.dtype)
    states = OnlineStates(Target.load(paths.TARGET, dtype, choose_device()))
    return states.with_targets(rows), states


def write_history(lines: Sequence[str], name: str) -> None:
    """The training's curve for the report and for `dvc plots`, without what differs from run to run."""
    rows = [json.loads(line) for line in lines]
    kept = [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]
    write_jsonl(paths.TRAINING / f"{name}.jsonl", kept)
    with replacing(paths.TRAINING / f"{name}.csv") as temporary:
        pd.DataFrame(kept)[["step", "loss", "lr", "gradient_norm"]].to_csv(temporary, index=False)


def main() -> None:
    parser = stage_parser(__doc__)
    parser.add_argument("draft", help="the name of the draft in params.yaml, such as eagle3")
    arguments = parser.parse_args()
    settings = read_settings(arguments.params)
    if arguments.draft not in settings.drafts:
        parser.error(f"draft {arguments.draft!r} is unknown: choose from {', '.join(settings.drafts)}")
    name, draft = arguments.draft, settings.drafts[arguments.draft]

    from eagle3.data.vocabulary import hash_tokenizer, load_vocabulary
    from eagle3.models.checkpoint import save_draft
    from eagle3.models.target import Target
    from eagle3.training.trainer import METRICS, Trainer, describe

    target = Target.load(paths.TARGET, compiled=False)
    regenerated = json.loads((paths.REGENERATED / "manifest.json").read_text(encoding="utf-8"))
    vocabulary = load_vocabulary(paths.VOCABULARY, hash_tokenizer(target.tokenizer), regenerated["data_hash"])
    identity: dict[str, Any] = {
        "draft": draft.model_dump(mode="json"),
        "target": hash_tree(paths.TARGET),
        "tokenizer": vocabulary.tokenizer_hash,
        "data": regenerated["data_hash"],
        "vocabulary": hash_tree(paths.VOCABULARY),
        "code": hash_stage_code("train"),
    }
    folder = paths.RUNS / "train" / name
    rows, states = training_data(settings)
    batches = start_batches(rows, states, target.hidden_size)
    objective = build_objective(target, vocabulary, draft, settings.train, batches, settings.seed)
    tracker = Tracker.open(settings)
    with tracker.run("train", name, method=name) as run:
        run.log_params({"draft": draft.model_dump(mode="json")})
        run.log_dataset("regenerated", paths.REGENERATED, "training")
        metrics = folder / METRICS
        before_a_kill = set(metrics.read_text(encoding="utf-8").splitlines()) if metrics.is_file() else set()
        with run.metric_buffer() as log:
            trainer = Trainer(
                objective,
                settings.train,
                rows,
                states,
                target.hidden_size,
                settings.seed,
                folder,
                identity,
                log,
            )
            result = trainer.run()
        manifest = {**identity, "train": settings.train.model_dump(mode="json"), "seed": settings.seed}
        save_draft(paths.DRAFTS / name, objective.module, target, {**manifest, "result": describe(result)})
        lines = metrics.read_text(encoding="utf-8").splitlines()
        run.log_history(json.loads(line) for line in lines if line in before_a_kill)
        write_history(lines, name)
        run.log_artifact(paths.DRAFTS / name, "checkpoint")
    shutil.rmtree(folder)  # only now: until here a killed run goes on from it
    print(
        f"{paths.DRAFTS / name}: {result.tokens} tokens in {result.steps} steps; simulated acceptance length "
        f"{result.acceptance_length:.2f} at step {result.best_step}"
    )


if __name__ == "__main__":
    main()
