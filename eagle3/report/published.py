"""Published numbers of the EAGLE-3 paper (arXiv 2503.01840), for comparison with what was measured here."""

from dataclasses import dataclass

SOURCE = "arXiv 2503.01840"
TASKS = ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DM", "mean")
# The published name of a task here.
TASK_NAMES = {
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "instructions": "instructions",
    "summaries": "summaries",
    "questions": "questions",
    "all": "all tasks",
}


@dataclass(frozen=True)
class Published:
    """Speedup and mean acceptance length of one method, by column of the paper's table."""

    target: str
    method: str
    values: tuple[tuple[float, float], ...]


# Table 1, temperature 0: (speedup, τ) for each of TASKS.
TABLE_1_GREEDY = (
    Published(
        "Vicuna-13B",
        "SpS",
        ((1.93, 2.27), (2.23, 2.57), (1.77, 2.01), (1.76, 2.03), (1.93, 2.33), (1.92, 2.24)),
    ),
    Published(
        "Vicuna-13B",
        "PLD",
        ((1.58, 1.63), (1.85, 1.93), (1.68, 1.73), (1.16, 1.19), (2.42, 2.50), (1.74, 1.80)),
    ),
    Published(
        "Vicuna-13B",
        "Medusa",
        ((2.07, 2.59), (2.50, 2.78), (2.23, 2.64), (2.08, 2.45), (1.71, 2.09), (2.12, 2.51)),
    ),
    Published(
        "Vicuna-13B",
        "Lookahead",
        ((1.65, 1.69), (1.71, 1.75), (1.81, 1.90), (1.46, 1.51), (1.46, 1.50), (1.62, 1.67)),
    ),
    Published(
        "Vicuna-13B",
        "Hydra",
        ((2.88, 3.65), (3.28, 3.87), (2.93, 3.66), (2.86, 3.53), (2.05, 2.81), (2.80, 3.50)),
    ),
    Published(
        "Vicuna-13B",
        "EAGLE",
        ((3.07, 3.98), (3.58, 4.39), (3.08, 3.97), (3.03, 3.95), (2.49, 3.52), (3.05, 3.96)),
    ),
    Published(
        "Vicuna-13B",
        "EAGLE-2",
        ((4.26, 4.83), (4.96, 5.41), (4.22, 4.79), (4.25, 4.89), (3.40, 4.21), (4.22, 4.83)),
    ),
    Published(
        "Vicuna-13B",
        "EAGLE-3",
        ((5.58, 6.65), (6.47, 7.54), (5.32, 6.29), (5.16, 6.17), (5.01, 6.47), (5.51, 6.62)),
    ),
    Published(
        "Llama-3.1-8B",
        "EAGLE-2",
        ((3.16, 4.05), (3.66, 4.71), (3.39, 4.24), (3.28, 4.12), (2.65, 3.45), (3.23, 4.11)),
    ),
    Published(
        "Llama-3.1-8B",
        "EAGLE-3",
        ((4.40, 6.13), (4.85, 6.74), (4.48, 6.23), (4.82, 6.70), (3.65, 5.34), (4.44, 6.23)),
    ),
    Published(
        "Llama-3.3-70B",
        "EAGLE-3",
        ((4.11, 5.63), (4.79, 6.52), (4.34, 6.15), (4.30, 6.09), (3.27, 5.02), (4.12, 5.88)),
    ),
    Published(
        "DSL-8B",
        "EAGLE-3",
        ((4.05, 5.58), (4.59, 6.38), (5.01, 6.93), (3.65, 5.37), (3.52, 4.92), (4.16, 5.84)),
    ),
)
# Temperature 1: the means.
TABLE_1_SAMPLED = (
    Published("Vicuna-13B", "EAGLE", ((2.44, 3.45),)),
    Published("Vicuna-13B", "EAGLE-2", ((3.76, 4.41),)),
    Published("Vicuna-13B", "EAGLE-3", ((4.65, 5.67),)),
    Published("Llama-3.1-8B", "EAGLE-2", ((2.80, 3.62),)),
    Published("Llama-3.1-8B", "EAGLE-3", ((3.45, 4.92),)),
)
# Ablation on Llama-3.1-8B: MT-bench and GSM8K.
ABLATION_TASKS = ("MT-bench", "GSM8K")
ABLATION = (
    Published("Llama-3.1-8B", "EAGLE-2", ((3.16, 4.05), (3.39, 4.24))),
    Published("Llama-3.1-8B", "+ without the feature constraint", ((3.82, 5.37), (3.77, 5.22))),
    Published("Llama-3.1-8B", "+ fused features (EAGLE-3)", ((4.40, 6.13), (4.48, 6.23))),
)
