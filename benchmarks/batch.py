"""Throughput by batch size: vanilla and an EAGLE-3 draft in the native engine, interleaved in one run.

Rows start and finish at different times and are refilled, as in the throughput tables of the EAGLE papers.
Prints a table and writes --output (JSON), which the report shows.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import paths
from eagle3.config import load_settings
from eagle3.decoding.batch import BatchDecoder
from eagle3.decoding.batch_drafter import BatchEagleDrafter
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import TreeShape
from eagle3.measure.bench import Bench, evaluated_target
from eagle3.measure.lock import timing_lock
from eagle3.measure.prompts import task_prompts
from eagle3.measure.rendering import ChatRenderer
from eagle3.provenance import describe_run, fingerprint_machine, hash_tree, script_command, write_json

# Prompts for each place of the largest batch: rows finish and are refilled most of the time, as in serving.
_FILLINGS = 4

Arm = tuple[str, int]  # name and batch size


def measure(
    decoders: Mapping[Arm, BatchDecoder],
    prompts: Sequence[list[int]],
    arguments: argparse.Namespace,
    exact: bool,
) -> tuple[dict[Arm, list[float]], list[tuple[int, ...]]]:
    """Decode seconds of every repeat, all arms in random order within it, and the answers.

    Where arithmetic is exact all have to agree; where it rounds by the size of the batch, near ties differ.
    """
    seconds: dict[Arm, list[float]] = {arm: [] for arm in decoders}
    expected: list[tuple[int, ...]] = []
    order = random.Random(0)
    for repeat in tqdm(range(arguments.repeats + 1), unit="repeat"):  # the first is not timed
        for arm in order.sample(list(decoders), len(decoders)):
            generation = decoders[arm].generate(prompts, arguments.tokens, [Sampling()] * len(prompts))
            answers = [answer.token_ids for answer in generation.answers]
            expected = expected or answers
            if exact and answers != expected:
                sys.exit(f"{arm[0]} at batch size {arm[1]} gives other tokens than another decoder")
            if repeat:
                seconds[arm].append(generation.decode_seconds)
    return seconds, expected


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--draft", default="eagle3", help="a folder of models/drafts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--tree", type=int, nargs=3, default=[2, 1, 3], metavar=("STEPS", "TOPK", "TOKENS"), help="draft tree"
    )
    parser.add_argument("--tokens", type=int, default=32, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=paths.REPORTS / "throughput.json")
    arguments = parser.parse_args()
    settings = load_settings().evaluate
    target = evaluated_target(settings, "cuda" if torch.cuda.is_available() else "cpu")
    draft = Bench(target, paths.DRAFTS, getattr(torch, settings.draft_dtype)).head(arguments.draft)
    shape = TreeShape(*arguments.tree)
    tasks = ("mt_bench", "humaneval", "gsm8k")
    renderer = ChatRenderer(target.tokenizer, target.eos_token_ids)
    count = _FILLINGS * max(arguments.sizes)
    by_task = [task_prompts(paths.TASKS, [task], "held_out", count) for task in tasks]
    # The same prompts for every size, the tasks in turn.
    chosen = [prompt for group in zip(*by_task, strict=False) for prompt in group][:count]
    prompts = [renderer(prompt, []) for prompt in chosen]
    decoders = {
        (name, size): BatchDecoder(
            target, name, size, None if name == "vanilla" else BatchEagleDrafter(draft, shape)
        )
        for size in arguments.sizes
        for name in ("vanilla", arguments.draft)
    }
    with timing_lock():
        seconds, expected = measure(decoders, prompts, arguments, settings.dtype == "float32")
    decoded = sum(len(answer) - 1 for answer in expected)  # the prefill's token left out
    rows = []
    for size in arguments.sizes:
        base = statistics.median(seconds["vanilla", size])
        mine = statistics.median(seconds[arguments.draft, size])
        ratios = sorted(
            vanilla / speculative
            for vanilla, speculative in zip(
                seconds["vanilla", size], seconds[arguments.draft, size], strict=True
            )
        )
        row = {
            "batch_size": size,
            "vanilla_tokens_per_second": decoded / base,
            "tokens_per_second": decoded / mine,
            "speedup": base / mine,
            "speedup_lowest": ratios[0],
            "speedup_highest": ratios[-1],
        }
        rows.append(row)
        print(
            f"batch {size:>3}: vanilla {row['vanilla_tokens_per_second']:7.1f} tokens/s, {arguments.draft} "
            f"{row['tokens_per_second']:7.1f}, ratio {row['speedup']:.2f} "
            f"({row['speedup_lowest']:.2f} to {row['speedup_highest']:.2f})"
        )
    write_json(
        arguments.output,
        {
            "machine": fingerprint_machine(),
            "target": hash_tree(paths.TARGET),
            "dtype": settings.dtype,
            "device": target.device.type,
            "draft_dtype": settings.draft_dtype,
            "drafts": {arguments.draft: hash_tree(paths.DRAFTS / arguments.draft)},
            "origin": describe_run(
                Path(__file__).resolve().parents[1], script_command("benchmarks/batch.py")
            ),
            "draft": arguments.draft,
            "tree": shape.as_dict(),
            "prompts": len(prompts),
            "tokens": arguments.tokens,
            "repeats": arguments.repeats,
            "results": rows,
        },
    )
    print(json.dumps({"output": str(arguments.output)}))


if __name__ == "__main__":
    main()
