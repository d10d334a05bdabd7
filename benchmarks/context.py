"""Acceptance by context length, from short prompts to beyond the rows that the drafts were trained on.

Prompts are articles of the summaries task, joined and cut to a length. Only acceptance is measured, not
time, so that other work on the machine does no harm. In float32 every output has to be vanilla's. Prints a
line a draft and writes --output (JSON), which the report shows.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import paths
from eagle3.config import load_settings
from eagle3.data.chat import conversation, render_prompt
from eagle3.data.rows import read_rows
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.measure.bench import Bench, evaluated_target
from eagle3.measure.prompts import task_prompts
from eagle3.models.checkpoint import MANIFEST
from eagle3.models.target import Target
from eagle3.provenance import describe_run, fingerprint_machine, hash_tree, script_command, write_json

TASK = "summaries"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--drafts", nargs="+", default=["eagle", "eagle3"], help="folders of models/drafts")
    parser.add_argument(
        "--tree", type=int, nargs=3, default=[3, 1, 4], metavar=("STEPS", "TOPK", "TOKENS"), help="draft tree"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 1536])
    parser.add_argument("--prompts", type=int, default=6, help="of each length")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a prompt")
    parser.add_argument("--output", type=Path, default=paths.REPORTS / "context.json")
    arguments = parser.parse_args()
    settings = load_settings().evaluate
    target = evaluated_target(settings, "cuda" if torch.cuda.is_available() else "cpu")
    longest = target.config.max_position_embeddings - arguments.tokens - arguments.tree[2]
    if max(arguments.lengths) > longest:
        parser.error(f"--lengths {max(arguments.lengths)}: the target's longest prompt is {longest} tokens")
    limit = longest_training_row(arguments.drafts)
    bench = Bench(target, paths.DRAFTS, getattr(torch, settings.draft_dtype))
    shape = TreeShape(*arguments.tree)
    vanilla = VanillaDecoder(target)
    decoders = [
        SpeculativeDecoder(target, EagleDrafter(bench.head(name), shape), name) for name in arguments.drafts
    ]
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(arguments.lengths) * arguments.prompts, unit="prompt") as bar:
        for length in arguments.lengths:
            counts = {decoder.name: [0, 0] for decoder in decoders}  # tokens of rounds, rounds
            for prompt in prompts_of(target, length, arguments.prompts):
                expected = vanilla.generate(prompt, arguments.tokens, Sampling()).token_ids
                for decoder in decoders:
                    generation = decoder.generate(prompt, arguments.tokens, Sampling())
                    if settings.dtype == "float32" and generation.token_ids != expected:
                        sys.exit(f"{decoder.name} at {length} tokens gives other tokens than vanilla")
                    counts[decoder.name][0] += sum(generation.acceptance_lengths)
                    counts[decoder.name][1] += len(generation.acceptance_lengths)
                bar.update()
            for name, (produced, rounds) in counts.items():
                if not rounds:
                    sys.exit(f"{name} at {length} tokens: no answer had a second token")
                rows.append({"length": length, "draft": name, "tau": produced / rounds, "rounds": rounds})
    for name in arguments.drafts:
        found = ", ".join(f"{row['length']}: {row['tau']:.2f}" for row in rows if row["draft"] == name)
        print(f"{name:<10} tau by tokens of prompt: {found}")
    write_json(
        arguments.output,
        {
            "machine": fingerprint_machine(),
            "target": hash_tree(paths.TARGET),
            "dtype": settings.dtype,
            "device": target.device.type,
            "draft_dtype": settings.draft_dtype,
            "drafts": {name: hash_tree(paths.DRAFTS / name) for name in arguments.drafts},
            "origin": describe_run(
                Path(__file__).resolve().parents[1], script_command("benchmarks/context.py")
            ),
            "tree": shape.as_dict(),
            "prompts": arguments.prompts,
            "tokens": arguments.tokens,
            "longest_training_row": limit,
            "results": rows,
        },
    )
    print(json.dumps({"output": str(arguments.output)}))


def longest_training_row(drafts: list[str]) -> int:
    """Tokens of the longest row that all of the drafts were trained on."""
    manifests = [json.loads((paths.DRAFTS / name / MANIFEST).read_text(encoding="utf-8")) for name in drafts]
    for name, manifest in zip(drafts, manifests, strict=True):
        if "train" not in manifest:
            sys.exit(f"{name} was trained elsewhere, on rows of unknown length: leave it out of --drafts")
    limit = min(manifest["train"]["max_length"] for manifest in manifests)
    lengths = (len(row.token_ids) for row in read_rows(paths.REGENERATED) if row.split == "train")
    return max(length for length in lengths if length <= limit)


def prompts_of(target: Target, length: int, count: int) -> Iterator[list[int]]:
    """`count` prompts of about `length` tokens, each of articles of its own."""
    articles = iter(task_prompts(paths.TASKS, [TASK], "held_out", 10**6))
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            article = next(articles, None)
            if article is None:
                sys.exit(f"too few articles in {TASK} for {count} prompts of {length} tokens: lower one")
            ids += target.tokenizer.encode(article.turns[0] + "\n\n", add_special_tokens=False)
        around = len(render_prompt(target.tokenizer, conversation([""])))
        text = target.tokenizer.decode(ids[: max(1, length - around)])
        yield render_prompt(target.tokenizer, conversation([text]))


if __name__ == "__main__":
    main()
