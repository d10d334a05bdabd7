"""Are all outputs the target's own? Held-out prompts, greedy, float32, every method against transformers.

Compares `transformers.generate` with vanilla, the methods of params.yaml, and a random draft, token by token.
Prints one line a method and, last, one JSON line; exits 1 if anything differs.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import paths
from eagle3.config import load_settings
from eagle3.data.chat import conversation, render_prompt
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.generation import Decoder
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.measure.bench import Bench
from eagle3.models.checkpoint import load_module
from eagle3.models.eagle3 import Eagle3Draft, Eagle3Module
from eagle3.models.target import Target

SHAPES = {"3/1/4": TreeShape(3, 1, 4), "3/4/8": TreeShape(3, 4, 8), "5/8/24": TreeShape(5, 8, 24)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["mt_bench", "humaneval", "gsm8k"])
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts a task")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    arguments = parser.parse_args()
    target = Target.load(paths.TARGET)
    decoders = build_decoders(target)
    equal = dict.fromkeys((decoder.name for decoder in decoders), 0)
    prompts = held_out(arguments.tasks, arguments.prompts)
    for turn in tqdm(prompts, unit="prompt"):
        ids = render_prompt(target.tokenizer, conversation([turn]))
        reference = reference_tokens(target, ids, arguments.tokens)
        for decoder in decoders:
            generation = decoder.generate(ids, arguments.tokens, Sampling())
            equal[decoder.name] += list(generation.token_ids) == reference
    for name, count in equal.items():
        print(f"{name:<24} {count} of {len(prompts)} prompts token-identical to transformers generate")
    print(json.dumps({"prompts": len(prompts), "tokens": arguments.tokens, "equal": equal}))
    sys.exit(any(count < len(prompts) for count in equal.values()))


def held_out(tasks: list[str], count: int) -> list[str]:
    """The first turns of held-out prompts."""
    turns: list[str] = []
    for task in tasks:
        with (paths.TASKS / f"{task}.jsonl").open(encoding="utf-8") as stream:
            rows = [row for row in map(json.loads, stream) if row["split"] == "held_out"]
        turns += [row["turns"][0] for row in rows[:count]]
    return turns


def build_decoders(target: Target) -> list[Decoder]:
    """Vanilla, every method of params.yaml, and a trained and a random draft with trees of several shapes."""
    settings = load_settings()
    bench = Bench(target, paths.DRAFTS, torch.float32)
    methods = [bench.decoder(method) for method in settings.evaluate.methods]
    trained = load_module(paths.DRAFTS / "eagle3", "eagle3")
    assert isinstance(trained, Eagle3Module)
    torch.manual_seed(0)
    random = Eagle3Module(trained.config)
    random.set_vocabulary(trained.draft_to_target)
    drafts = {"eagle3": bench.head("eagle3"), "random draft": Eagle3Draft(random, target)}
    return [
        VanillaDecoder(target),
        *methods,
        *(
            SpeculativeDecoder(target, EagleDrafter(draft, shape), f"{name}, {label}")
            for name, draft in drafts.items()
            for label, shape in SHAPES.items()
        ),
    ]


@torch.inference_mode()
def reference_tokens(target: Target, ids: list[int], tokens: int) -> list[int]:
    """What transformers generates."""
    output = target.model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=sorted(target.eos_token_ids)
    )
    generated: list[int] = output[0, len(ids) :].tolist()
    return generated


if __name__ == "__main__":
    main()
