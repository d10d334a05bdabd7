"""Vanilla decoding against transformers' generate, and the cost of verifying n tokens, in one run.

Greedy, float32, the same prompts and token counts; the two take turns at every prompt. Prints a table and,
last, one JSON line. Outputs are compared token by token.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import paths
from eagle3.data.chat import conversation, render_prompt
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target

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
    target = Target.load(paths.TARGET)
    ours, theirs, equal = compare(target, arguments.tokens, arguments.repeats)
    print(f"transformers generate {1 / theirs:6.1f} tokens/s (prefill included)")
    print(f"vanilla               {1 / ours:6.1f} tokens/s (likewise), {theirs / ours:.2f} times as fast")
    print(f"outputs equal for {equal} of {len(PROMPTS)} prompts")
    costs = verification_costs(target, arguments.verify, arguments.repeats)
    for count, seconds in costs.items():
        print(f"verifying {count:>3} tokens {seconds * 1e3:7.1f} ms, {seconds / costs[1]:.2f} vanilla steps")
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "kernels": target.kernels,
                "vanilla_over_transformers": theirs / ours,
                "outputs_equal": equal,
                "verification_in_vanilla_steps": {
                    count: seconds / costs[1] for count, seconds in costs.items()
                },
            }
        )
    )


def compare(target: Target, tokens: int, repeats: int) -> tuple[float, float, int]:
    """Median seconds a token of both over all prompts, and for how many prompts the outputs are equal."""
    decoder = VanillaDecoder(target)
    ours: list[float] = []
    theirs: list[float] = []
    equal = 0
    for repeat in range(repeats + 1):  # the first is not timed
        equal = 0
        for prompt in PROMPTS:
            ids = render_prompt(target.tokenizer, conversation([prompt]))
            started = time.perf_counter()
            mine = list(decoder.generate(ids, tokens, Sampling()).token_ids)
            middle = time.perf_counter()
            output = target.model.generate(
                torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
            ended = time.perf_counter()
            reference = output[0, len(ids) :].tolist()
            equal += mine == reference
            if repeat:
                ours.append((middle - started) / len(mine))
                theirs.append((ended - middle) / len(reference))
    return sorted(ours)[len(ours) // 2], sorted(theirs)[len(theirs) // 2], equal


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
