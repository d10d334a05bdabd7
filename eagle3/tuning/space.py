"""What a sweep may choose: every tree worth measuring up to a size, and the options beside it.

A tree is worth measuring if SGLang takes it (`eagle3.decoding.tree.TreeShape` has the rule) and if it keeps
more drafted tokens than it has levels, or as many: with fewer, the deepest levels can never be kept, and the
same tree with fewer levels is the same at less cost.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import optuna

# How much of the range of token budgets a tree takes, on a logarithmic scale: 0 the smallest, 1 the largest.
FILL = "fill"


class Options(NamedTuple):
    """What stands beside the tree and changes the cost of every round."""

    draft: str
    draft_dtype: str
    threads: int
    backend: str


@dataclass(frozen=True)
class Configuration:
    """One point of the space: a tree in SGLang's names, and options; `threads` 0 is torch's choice."""

    draft: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    draft_dtype: str
    threads: int
    backend: str = "kernels"  # what computes the draft: see `config.HeadMethod`
    confidence: float = 0.0  # of the path to a node, below which it is not drafted: see `TreeShape`

    @property
    def tree(self) -> dict[str, int]:
        """The tree's part alone."""
        return {key: getattr(self, key) for key in ("num_steps", "topk", "num_draft_tokens")}

    @property
    def options(self) -> Options:
        """All but the tree and its confidence."""
        return Options(self.draft, self.draft_dtype, self.threads, self.backend)

    @property
    def drafted_whole(self) -> bool:
        """Whether every round's tree has the same size, so that the cost model can say what it costs."""
        return self.confidence == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# As near to vanilla as drafting gets.
VANILLA_LIKE = (1, 1, 2)
# What others use or would try first.
KNOWN_TREES: dict[str, tuple[int, int, int]] = {
    "chain": (3, 1, 4),
    "SGLang's default": (5, 4, 8),
    "EAGLE-3 paper": (7, 10, 60),
    "EAGLE-3 with 64 tokens": (5, 8, 64),
}


def budgets(num_steps: int, topk: int, most: int) -> range:
    """Token budgets (root included) of the trees with these levels and branching, up to `most`.

    Worked: 2 levels of 2 have at most 2 + 2**2 = 6 nodes beside the root, and need 3 to use both: 3..7.
    """
    largest = num_steps + 1 if topk == 1 else 1 + topk + (num_steps - 1) * topk**2
    return range(num_steps + 1, min(largest, most) + 1)


@dataclass(frozen=True)
class Space:
    """All configurations up to the given sizes, for every draft and option; the first is the default."""

    drafts: tuple[str, ...]
    max_num_steps: int
    max_topk: int
    max_num_draft_tokens: int
    draft_dtypes: tuple[str, ...]
    threads: tuple[int, ...]
    backends: tuple[str, ...] = ("kernels",)
    confidences: tuple[float, ...] = (0.0,)

    def configurations(self) -> Iterator[Configuration]:
        """Every configuration once."""
        trees = [
            (steps, topk, tokens)
            for steps in range(1, self.max_num_steps + 1)
            for topk in range(1, self.max_topk + 1)
            for tokens in self.budgets(steps, topk)
        ]
        for draft, *options in self._options():
            yield from (Configuration(draft, *tree, *options) for tree in trees)

    def _options(self) -> Iterator[tuple[Any, ...]]:
        """Every choice of draft, and of what stands behind the tree in a configuration."""
        return itertools.product(
            self.drafts, self.draft_dtypes, self.threads, self.backends, self.confidences
        )

    def budgets(self, num_steps: int, topk: int) -> range:
        """Token budgets of the trees with these levels and branching."""
        return budgets(num_steps, topk, self.max_num_draft_tokens)

    def contains(self, configuration: Configuration) -> bool:
        """Whether the configuration is a point of the space."""
        return (
            configuration.draft in self.drafts
            and configuration.draft_dtype in self.draft_dtypes
            and configuration.threads in self.threads
            and configuration.backend in self.backends
            and configuration.confidence in self.confidences
            and self.has_tree(configuration)
        )

    def has_tree(self, configuration: Configuration) -> bool:
        """Whether the tree is one of the space's, whatever the options."""
        return (
            1 <= configuration.num_steps <= self.max_num_steps
            and 1 <= configuration.topk <= self.max_topk
            and configuration.num_draft_tokens in self.budgets(configuration.num_steps, configuration.topk)
        )

    def default(self, tree: tuple[int, int, int]) -> Configuration:
        """A tree, drafted whole, with the first draft and the first of every other option."""
        return Configuration(self.drafts[0], *tree, self.draft_dtypes[0], self.threads[0], self.backends[0])

    def known(self) -> dict[str, Configuration]:
        """The well-known trees of the space's sizes, drafted whole, by name."""
        found = {name: self.default(tree) for name, tree in KNOWN_TREES.items()}
        return {name: item for name, item in found.items() if self.has_tree(item)}

    def grid(
        self, num_steps: Sequence[int], topk: Sequence[int], num_draft_tokens: Sequence[int]
    ) -> list[Configuration]:
        """The configurations at the given points, chains with the budget that follows; without repetition."""
        points = (
            Configuration(draft, steps, width, steps + 1 if width == 1 else tokens, *options)
            for draft, *options in self._options()
            for steps in num_steps
            for width in topk
            for tokens in num_draft_tokens
        )
        return [point for point in dict.fromkeys(points) if self.contains(point)]

    def label(self, configuration: Configuration) -> str:
        """A name that tells configurations apart: the tree, and options that vary or that the space lacks."""

        def tells(options: Sequence[Any], value: Any) -> bool:
            return len(options) > 1 or value not in options

        parts = ["/".join(str(value) for value in configuration.tree.values())]
        if tells(self.drafts, configuration.draft):
            parts.insert(0, configuration.draft)
        if tells(self.draft_dtypes, configuration.draft_dtype):
            parts.append(configuration.draft_dtype)
        if tells(self.threads, configuration.threads):
            parts.append(f"{configuration.threads} threads")
        if tells(self.backends, configuration.backend):
            parts.append(configuration.backend)
        if tells(self.confidences, configuration.confidence):
            parts.append(f"confidence {configuration.confidence:g}")
        return " ".join(parts)

    def suggest(self, trial: optuna.Trial, always_fill: bool = False) -> Configuration:
        """Let the trial choose; only feasible trees can come out.

        The token budget is chosen as its place between the smallest and the largest that the levels and
        branching allow, so that every parameter's range is the same in all trials, which samplers that model
        parameters jointly need. A chain has no budget to choose; `always_fill` has one chosen and ignored,
        for samplers that need the same parameters in every trial.
        """
        draft = _choose(trial, "draft", self.drafts)
        steps = trial.suggest_int("num_steps", 1, self.max_num_steps)
        topk = trial.suggest_int("topk", 1, self.max_topk, log=True)
        fill = trial.suggest_float(FILL, 0.0, 1.0) if topk > 1 or always_fill else 0.0
        return Configuration(
            draft,
            steps,
            topk,
            budget_at(self.budgets(steps, topk), fill),
            _choose(trial, "draft_dtype", self.draft_dtypes),
            _choose(trial, "threads", self.threads),
            _choose(trial, "backend", self.backends),
            _choose(trial, "confidence", self.confidences),
        )

    def parameters(self, configuration: Configuration, always_fill: bool = False) -> dict[str, Any]:
        """What `suggest` must choose to give this configuration."""
        assert self.contains(configuration), configuration
        steps, topk = configuration.num_steps, configuration.topk
        values: dict[str, Any] = {"num_steps": steps, "topk": topk}
        if topk > 1 or always_fill:
            values[FILL] = fill_of(self.budgets(steps, topk), configuration.num_draft_tokens)
        for key, options in (
            ("draft", self.drafts),
            ("draft_dtype", self.draft_dtypes),
            ("threads", self.threads),
            ("backend", self.backends),
            ("confidence", self.confidences),
        ):
            if len(options) > 1:
                values[key] = getattr(configuration, key)
        return values


def budget_at(choices: range, fill: float) -> int:
    """The budget at a place of the range: 0 the smallest, 1 the largest, even steps being even factors."""
    return round(choices[0] * (choices[-1] / choices[0]) ** fill)


def fill_of(choices: range, budget: int) -> float:
    """The inverse of `budget_at`."""
    if len(choices) == 1:
        return 0.0
    return math.log(budget / choices[0]) / math.log(choices[-1] / choices[0])


def _choose(trial: optuna.Trial, name: str, options: tuple[Any, ...]) -> Any:
    """One of the options; a single one is no parameter."""
    return options[0] if len(options) == 1 else trial.suggest_categorical(name, options)
