"""Collect training prompts, from the target itself and from files, and evaluation tasks kept out of them."""

import json
from functools import partial

from cli import choose_device, read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.provenance import hash_object, hash_stage_code


def sampled_from() -> str:
    """What self-made prompts depend on besides the settings: the target and this stage's code."""
    from eagle3.models.target import MANIFEST

    target = json.loads((paths.TARGET / MANIFEST).read_text(encoding="utf-8"))
    # Its hash leaves out which of its layers a draft reads: no sampled token depends on that.
    return hash_object({"target": target["hash"], "code": hash_stage_code("prompts")})


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    import torch

    from eagle3.data.generate import complete
    from eagle3.data.prompts import prepare_prompts
    from eagle3.decoding.sampling import Sampling
    from eagle3.models.target import Target

    own = settings.prompts.self_generated
    target = Target.load(paths.TARGET, getattr(torch, own.dtype), choose_device())
    sampling = Sampling(own.temperature, 0, own.top_p, settings.seed)
    manifest = prepare_prompts(
        target.tokenizer,
        settings.prompts,
        settings.tasks,
        settings.seed,
        partial(
            complete, target, sampling=sampling, batch_size=own.batch_size, max_new_tokens=own.max_new_tokens
        ),
        sampled_from(),
        paths.PROMPTS,
        paths.TASKS,
        paths.RUNS / "self_prompts.jsonl",
    )
    print(f"{paths.PROMPTS}: {manifest['splits']}, from {manifest['sources']}")
    print(
        f"{paths.TASKS}: {', '.join(manifest['tasks'])}; removed from training: {manifest['decontamination']}"
    )


if __name__ == "__main__":
    run_in_words(main)
