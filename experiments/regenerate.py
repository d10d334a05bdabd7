"""Let the target answer the training prompts; a run that was killed goes on where it was."""

import json

from cli import choose_device, read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.config import Settings
from eagle3.provenance import hash_stage_code, hash_tree
from eagle3.tracking import Tracker


def device_of(settings: Settings) -> str:
    """Where the target is loaded. If servers answer, its tokenizer alone is asked: they may fill the GPU."""
    return "cpu" if settings.regenerate.endpoints else choose_device()


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    import torch

    from eagle3.data.prompt import Prompt
    from eagle3.data.regenerate import regenerate
    from eagle3.models.target import Target

    asked = paths.PROMPTS / "train.jsonl"
    if not asked.is_file():
        raise ValueError(f"{asked}: no training prompts there; run python experiments/prompts.py")
    with asked.open(encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    prompts = [
        (Prompt(row["id"], row["source"], tuple(row["turns"]), row["system"]), row["split"]) for row in rows
    ]
    tracker = Tracker.open(settings)
    with tracker.run("regenerate", "regenerate") as run:
        run.log_dataset("prompts", paths.PROMPTS, "regeneration")
        dtype = getattr(torch, settings.regenerate.dtype)
        target = Target.load(paths.TARGET, dtype, device_of(settings))
        manifest = regenerate(
            target,
            prompts,
            settings.regenerate,
            settings.seed,
            paths.REGENERATED,
            paths.HIDDEN_STATES,
            identity={"target": hash_tree(paths.TARGET), "code": hash_stage_code("regenerate")},
        )
        run.log_metrics({key: value for key, value in manifest.items() if isinstance(value, int | float)})
        run.log_metrics({f"finished.{reason}": count for reason, count in manifest["finish_reason"].items()})
        run.log_tags({"data_hash": manifest["data_hash"]})
        run.log_artifact(paths.REGENERATED / "manifest.json")
    print(
        f"{paths.REGENERATED}: {manifest['rows']} rows, {manifest['answer_tokens']} answer tokens, "
        f"finished by {manifest['finish_reason']}, left out {manifest['left_out']}"
    )


if __name__ == "__main__":
    run_in_words(main)
