"""Results as the stages write them: an evaluation of fake decoders, histories and optional files."""

import json
import random
from pathlib import Path
from typing import Any

from eagle3.decoding.generation import Decoder
from eagle3.measure.evaluation import evaluate
from eagle3.measure.settings import EvaluationSettings
from tests.measure.fakes import FakeDecoder, fake_renderer, fake_rescore, prompts

MACHINE = {
    "cpu": "Imaginary CPU @ 2.00GHz",
    "usable_cores": 2,
    "memory_gib": 8,
    "instruction_set": ["avx2", "avx512f"],
    "gpus": [],
    "libraries": {"torch": "2.13.0"},
}


def write_evaluation(
    reports: Path, *, temperatures: tuple[float, ...] = (0.0, 1.0), tasks: int = 3, faults: bool = True
) -> dict[str, Any]:
    """Evaluate fakes: one twice as fast, one tree, one slower than vanilla, and one that changes tokens."""
    decoders: list[Decoder] = [
        FakeDecoder("vanilla", 0.018, prefill_seconds=0.05),
        FakeDecoder("eagle", 0.012, round_tokens=2, prefill_seconds=0.06),
        FakeDecoder("eagle3", 0.009, round_tokens=4, prefill_seconds=0.06),
    ]
    if faults:
        decoders += [
            FakeDecoder("prompt-lookup", 0.021, round_tokens=3, prefill_seconds=0.05),
            FakeDecoder(
                "broken", 0.008, round_tokens=3, spoil=lambda tokens: (*tokens[:-1], (tokens[-1] + 3) % 50)
            ),
        ]
    names = ["mt_bench", "humaneval", "gsm8k"][:tasks]
    items = [
        item for index, task in enumerate(names) for item in prompts(10, task, turns=2 if index == 0 else 1)
    ]
    return evaluate(
        decoders,
        items,
        fake_renderer,
        fake_rescore,
        EvaluationSettings(max_new_tokens=40, dtype="bfloat16", temperatures=temperatures, repeats=1),
        machine=MACHINE,
        subject={"target": "5f1d", "drafts": {"eagle3": "8a11"}, "threads": 2},
        origin={
            "commit": "0123456789abcdef",
            "dirty": True,
            "command": "dvc repro evaluate",
            "adaptive_costs_ms": {
                "eagle3-adaptive": {"verify": [45.0, 45.5, 46.1], "draft_step": 2.5, "fixed": 2.75}
            },
            "bound": {
                "weights_mb": 538.0,
                "bandwidth_gb_s": 15.0,
                "arithmetic_gflop_s": 95.0,
                "read_ms": 35.9,
                "arithmetic_ms_per_token": 2.83,
            },
        },
        trees={"eagle3": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}},
        pairs=[("eagle3", "eagle")],
        reports=reports,
        journal=reports / "journal.jsonl",
        progress=False,
    )


def write_history(path: Path, steps: int = 600) -> Path:
    """A training's metrics.jsonl, validated every 50 steps."""
    noise = random.Random(0)
    with path.open("w") as stream:
        for step in range(1, steps + 1):
            progress = step / steps
            row: dict[str, Any] = {
                "step": step,
                "loss": 4.0 * (1 - progress) + 1.2 + noise.gauss(0, 0.1),
                **{
                    f"accuracy/depth_{depth}": 0.5 * progress / (depth + 1) + noise.gauss(0, 0.02)
                    for depth in range(3)
                },
                "lr": 1e-3 * (1 - progress),
                "gradient_norm": 1 + noise.random(),
                "tokens_per_second": 1400 + noise.gauss(0, 40),
            }
            if step % 50 == 0:
                row |= {f"acceptance/depth_{depth}": (0.6 - 0.1 * depth) * progress for depth in range(3)}
                row["acceptance_length"] = 1 + 1.2 * progress - 3 * max(0.0, progress - 0.8)
            stream.write(json.dumps(row) + "\n")
    return path


def write_optional(reports: Path) -> None:
    """ablation.json, scaling.json, sweep.json, throughput.json, context.json and serving.json."""
    noise = random.Random(1)

    def row(method: str, task: str, speedup: float, **values: Any) -> dict[str, Any]:
        bounds = {"speedup_low": speedup - 0.08, "speedup_high": speedup + 0.08}
        return {"method": method, "task": task, "speedup": speedup, **bounds, "tau": 1.4 * speedup, **values}

    variants = {"full": 1.6, "without fusion": 1.4, "without training-time test": 0.9}
    ablation = [
        row(name, task, value) for name, value in variants.items() for task in ("mt_bench", "gsm8k", "all")
    ]
    scaling = [
        row(
            method,
            task,
            offset + gain * index,
            train_tokens=50_000 * 2**index,
            acceptance_by_depth=[0.5 + gain, 0.25 + gain],
        )
        for method, gain in (("eagle", 0.06), ("eagle3", 0.14))
        for index in range(5)
        for task, offset in (("mt_bench", 0.5), ("gsm8k", 1.5), ("all", 1.0))
    ]
    trials = [
        {
            "number": number,
            "state": "complete" if number % 4 else "pruned",
            "params": {"num_steps": 1 + number % 5, "topk": 1 + number % 3, "num_draft_tokens": 6 + number},
            **(row("eagle3", "all", 1.1 + 0.5 * noise.random()) if number % 4 else {}),
        }
        for number in range(30)
    ]
    for trial in trials:
        if "tau" in trial:
            trial["tau"] = 1.2 + 1.6 * noise.random()
    held_out = [
        {**row("a", "all", 1.55), "name": "trial 17", "tuned": True},
        {**row("a", "all", 1.49), "name": "5 / 4 / 8", "tuned": False},
        {**row("a", "all", 0.91), "name": "5 / 8 / 64", "tuned": False},
    ]
    spread = {"median": 80.2, "p95": 91.0}

    def level(concurrency: int, tau: float | None) -> dict[str, Any]:
        return {
            "concurrency": concurrency,
            "tokens_per_second": 21.4,
            "time_to_first_token_ms": spread,
            "time_per_output_token_ms": None if concurrency > 1 else spread,
            "tau": tau,
            "counters": {"agree": concurrency == 1},
        }

    agreement = {"tokens_equal": True, "acceptance_equal": False, "hidden_states_equal": None}
    engines = {
        "sglang": {
            "version": "0.5.23",
            "dtype": "float32",
            "timed": False,
            "prompts": 16,
            **agreement,
            "experiments": [
                {"name": "vanilla", "levels": [level(1, None)]},
                {
                    "name": "eagle3",
                    "levels": [level(1, 2.2), level(4, 2.2)],
                    "server_accept_length": {"server": 2.31, "requests": 2.25},
                },
            ],
        },
        "vllm": {
            "version": "0.11",
            "dtype": "float32",
            "timed": True,
            "prompts": 16,
            **agreement,
            "experiments": [
                {"name": "vanilla", "levels": [level(1, None)]},
                {"name": "eagle", "unavailable": "no bias in fc"},
            ],
        },
    }
    contents = {
        "ablation": {"results": ablation},
        "scaling": {"results": scaling},
        "sweep": {
            "trials": trials,
            "held_out": held_out,
            "summary": "Nothing beats the defaults, with a reservation.",
            "reservations": ["Only 9 prompts were measured on held-out tasks."],
        },
        "serving": engines,
        "context": {
            "tree": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
            "prompts": 6,
            "tokens": 48,
            "longest_training_row": 384,
            "origin": {"command": "python benchmarks/context.py"},
            "results": [
                {"length": length, "draft": draft, "tau": tau, "rounds": 100}
                for draft, taus in (("eagle", (1.6, 1.6, 1.1)), ("eagle3", (1.8, 1.7, 1.5)))
                for length, tau in zip((128, 256, 512), taus, strict=True)
            ],
        },
        "throughput": {
            "draft": "eagle3",
            "tree": {"num_steps": 2, "topk": 1, "num_draft_tokens": 3},
            "tokens": 32,
            "repeats": 3,
            "origin": {"command": "python benchmarks/batch.py"},
            "results": [
                {
                    "batch_size": size,
                    "vanilla_tokens_per_second": 20.0 * size,
                    "tokens_per_second": 20.0 * size * (1.5 - 0.05 * size),
                    "speedup": 1.5 - 0.05 * size,
                    "speedup_lowest": 1.4 - 0.05 * size,
                    "speedup_highest": 1.6 - 0.05 * size,
                }
                for size in (1, 2, 4, 8)
            ],
        },
    }
    for name, content in contents.items():
        (reports / f"{name}.json").write_text(json.dumps(content))
