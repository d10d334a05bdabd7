"""Linear layers for few rows: the compiled kernel against torch.nn.functional.linear, in one run.

Prints a table (milliseconds for all linear layers of one forward, by rows) and, last, one JSON line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import paths
from eagle3.kernels import Linear
from eagle3.kernels.compiled_ops import CompiledOps
from eagle3.kernels.torch_ops import TorchOps
from eagle3.models.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    weights = layer_weights()
    kernels: dict[str, list[Linear]] = {
        "torch": [TorchOps().linear(weight) for weight in weights],
        "compiled": [CompiledOps().linear(weight) for weight in weights],
    }
    result: dict[str, dict[int, float]] = {name: {} for name in kernels}
    print(f"{'rows':>5} {'torch ms':>9} {'compiled ms':>12} {'ratio':>6}")
    for rows in arguments.rows:
        inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]
        reference = F.linear(inputs[0], weights[0])
        assert torch.allclose(kernels["compiled"][0](inputs[0]), reference, rtol=1e-4, atol=1e-3)
        times = interleaved(
            {name: runner(layers, inputs) for name, layers in kernels.items()}, arguments.repeats
        )
        for name, seconds in times.items():
            result[name][rows] = seconds * 1e3
        torch_ms, compiled_ms = result["torch"][rows], result["compiled"][rows]
        print(f"{rows:>5} {torch_ms:>9.1f} {compiled_ms:>12.1f} {torch_ms / compiled_ms:>6.2f}", flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), "milliseconds": result}))


def layer_weights() -> list[torch.Tensor]:
    """Every weight matrix that one forward of the target reads, fused as in decoding."""
    model = Target.load(paths.TARGET, compiled=False).model
    weights = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        weights.append(torch.cat([getattr(attention, f"{name}_proj").weight for name in "qkv"]))
        weights += [
            attention.o_proj.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight,
        ]
    return [*weights, model.lm_head.weight]


def runner(layers: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> Callable[[], None]:
    """One pass through all layers."""

    def run() -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return run


def interleaved(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns after one untimed call."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if repeat:
                times[name].append(time.perf_counter() - started)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


if __name__ == "__main__":
    main()
