"""Vanilla decoding against transformers' generate, and the cost of verifying n tokens, in one run.

Greedy, the same prompts and token counts; transformers in float32 and vanilla in float32 and with weights in
bfloat16 take turns at every prompt. Prints a table and, last, one JSON line. Outputs of float32 are compared
token by token.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import paths
from eagle3.data.chat import conversation, render_prompt
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target

TRANSFORMERS = "transformers generate"
PROMPTS = (
    "Explain how photosynthesis works in simple terms.",
    "Write a Python function that reverses a string, and explain it.",
    "A shop sells pens at 3 dollars each. Anna buys 7 and pays with 50 dollars. How much does she get back?",
    "Tell me a story about a fox and a crow.",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verify", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    targets = {name: Target.load(paths.TARGET, getattr(torch, name)) for name in ("float32", "bfloat16")}
    medians, equal = compare(targets, arguments.tokens, arguments.repeats)
    costs = {
        name: verification_costs(target, arguments.verify, arguments.repeats)
        for name, target in targets.items()
    }
    reference = medians.pop(TRANSFORMERS)
    print(f"{TRANSFORMERS}, float32: {1 / reference:.1f} tokens/s, prefill included, as below")
    for name, seconds in medians.items():
        print(f"vanilla, {name:<8}: {1 / seconds:.1f} tokens/s, {reference / seconds:.2f} times as fast")
    print(f"float32 outputs equal for {equal} of {len(PROMPTS)} prompts")
    for count in arguments.verify:
        texts = [
            f"{name} {by_count[count] * 1e3:6.1f} ms, {by_count[count] / by_count[1]:.2f} of its steps"
            for name, by_count in costs.items()
        ]
        print(f"verifying {count:>3} tokens: {'; '.join(texts)}")
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "kernels": targets["float32"].kernels,
                "vanilla_over_transformers": {name: reference / seconds for name, seconds in medians.items()},
                "outputs_equal": equal,
                "verification_in_vanilla_steps": {
                    name: {count: seconds / by_count[1] for count, seconds in by_count.items()}
                    for name, by_count in costs.items()
                },
            }
        )
    )


def compare(targets: Mapping[str, Target], tokens: int, repeats: int) -> tuple[dict[str, float], int]:
    """Median seconds a token of all arms, and for how many prompts float32's outputs are transformers'."""
    model, tokenizer = targets["float32"].model, targets["float32"].tokenizer

    def reference(ids: list[int]) -> list[int]:
        output = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        generated: list[int] = output[0, len(ids) :].tolist()
        return generated

    def vanilla(target: Target) -> Callable[[list[int]], list[int]]:
        decoder = VanillaDecoder(target)
        return lambda ids: list(decoder.generate(ids, tokens, Sampling()).token_ids)

    arms = {**{name: vanilla(target) for name, target in targets.items()}, TRANSFORMERS: reference}
    times: dict[str, list[float]] = {name: [] for name in arms}
    equal = 0
    for repeat in range(repeats + 1):  # the first is not timed
        equal = 0
        for prompt in PROMPTS:
            ids = render_prompt(tokenizer, conversation([prompt]))
            outputs = {}
            for name, generate in arms.items():
                started = time.perf_counter()
                outputs[name] = generate(ids)
                if repeat:
                    times[name].append((time.perf_counter() - started) / len(outputs[name]))
            equal += outputs["float32"] == outputs[TRANSFORMERS]
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}, equal


def verification_costs(target: Target, counts: list[int], repeats: int) -> dict[int, float]:
    """Median seconds of one forward over n tokens behind a context of 256."""
    cache = target.new_cache(256 + max(counts))
    ids = torch.randint(
        0, target.vocab_size, (1, 256 + max(counts)), generator=torch.Generator().manual_seed(0)
    )
    target.forward(ids[:, :256], torch.arange(256)[None], cache, logits="none")
    times: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(3 * repeats + 1):
        for count in counts:
            started = time.perf_counter()
            target.forward(ids[:, 256 : 256 + count], torch.arange(256, 256 + count)[None], cache)
            if repeat:
                times[count].append(time.perf_counter() - started)
            cache.truncate(256)
    return {count: sorted(values)[len(values) // 2] for count, values in times.items()}


if __name__ == "__main__":
    main()
