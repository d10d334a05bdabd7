"""Collect training prompts, from the target itself and from files, and evaluation tasks kept out of them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cli import choose_device, read_settings, stage_parser
from eagle3 import paths
from eagle3.config import SelfGenerated
from eagle3.provenance import hash_tree

if TYPE_CHECKING:
    from eagle3.data.self_prompts import Completion, Generate, PlannedPrompt
    from eagle3.models.target import Target


def sampler(target: "Target", settings: SelfGenerated, seed: int) -> "Generate":
    """Samples the target's continuations of planned user turns."""
    from eagle3.data.generate import Request, answer
    from eagle3.data.self_prompts import Completion
    from eagle3.decoding.sampling import Sampling

    sampling = Sampling(settings.temperature, 0, settings.top_p, seed)

    def generate(planned: Sequence["PlannedPrompt"]) -> Iterator["Completion"]:
        requests = [Request(item.id, (item.prefix_ids,)) for item in planned]
        longest = max(len(item.prefix_ids) for item in planned) + settings.max_new_tokens
        for answered in answer(
            target, requests, sampling, settings.batch_size, settings.max_new_tokens, longest, capture=False
        ):
            ((start, end),) = answered.answer_spans
            stopped = answered.finish_reason == "stop"
            ids = answered.token_ids[start : end - 1 if stopped else end]  # without the EOS
            yield Completion(answered.id, target.tokenizer.decode(ids), answered.finish_reason)

    return generate


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    import torch

    from eagle3.data.prompts import prepare_prompts
    from eagle3.models.target import Target

    own = settings.prompts.self_generated
    target = Target.load(paths.TARGET, getattr(torch, own.dtype), choose_device())
    manifest = prepare_prompts(
        target.tokenizer,
        settings.prompts,
        settings.tasks,
        settings.seed,
        sampler(target, own, settings.seed),
        hash_tree(paths.TARGET),
        paths.PROMPTS,
        paths.TASKS,
        paths.RUNS / "self_prompts.jsonl",
    )
    print(f"{paths.PROMPTS}: {manifest['splits']}, from {manifest['sources']}")
    print(
        f"{paths.TASKS}: {', '.join(manifest['tasks'])}; removed from training: {manifest['decontamination']}"
    )


if __name__ == "__main__":
    main()
