"""What is known of one configuration: paired decode times by prompt, and the rounds behind them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from eagle3.measure.acceptance import conditional_acceptance
from eagle3.measure.protocol import VANILLA
from eagle3.measure.records import Cell
from eagle3.measure.statistics import Interval, median_over_repeats, speedup_interval


@dataclass(frozen=True)
class PromptTimes:
    """One prompt, all turns together. Seconds of decoding, entry i of both measured one after the other."""

    vanilla_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    vanilla_tokens: int
    tokens: int
    same_tokens: bool  # as vanilla's, in every repeat

    @property
    def speedup(self) -> float:
        """Of the medians, per token."""
        ratio = median_over_repeats(self.vanilla_seconds) / median_over_repeats(self.seconds)
        return ratio * self.tokens / self.vanilla_tokens


@dataclass(frozen=True)
class Rounds:
    """Sums over all verification rounds. `reached[d]` of them drafted at depth d with all before accepted."""

    rounds: int = 0
    produced: int = 0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    cache_seconds: float = 0.0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __add__(self, other: "Rounds") -> "Rounds":
        values: dict[str, Any] = {}
        for item in fields(self):
            mine, yours = getattr(self, item.name), getattr(other, item.name)
            values[item.name] = _add(mine, yours) if isinstance(mine, tuple) else mine + yours
        return Rounds(**values)


@dataclass(frozen=True)
class Measurement:
    """Times by prompt ("task/id") and the sum of the rounds."""

    prompts: Mapping[str, PromptTimes] = field(default_factory=dict)
    rounds: Rounds = Rounds()

    def __add__(self, other: "Measurement") -> "Measurement":
        """Both together: repeats of the same prompt are joined."""
        prompts = dict(self.prompts)
        for key, times in other.prompts.items():
            prompts[key] = _join(prompts[key], times) if key in prompts else times
        return Measurement(prompts, self.rounds + other.rounds)

    @property
    def repeats(self) -> int:
        """Of the prompt measured least often; 0 without a prompt."""
        return min((len(times.seconds) for times in self.prompts.values()), default=0)

    @property
    def tau(self) -> float | None:
        """Mean acceptance length: tokens produced by rounds / rounds."""
        return self.rounds.produced / self.rounds.rounds if self.rounds.rounds else None

    @property
    def vanilla_seconds_per_token(self) -> float:
        """Of vanilla decoding, over all prompts."""
        seconds = sum(median_over_repeats(times.vanilla_seconds) for times in self.prompts.values())
        return seconds / sum(times.vanilla_tokens for times in self.prompts.values())

    @property
    def different_outputs(self) -> int:
        """Prompts whose tokens were not vanilla's."""
        return sum(not times.same_tokens for times in self.prompts.values())

    def speedups(self) -> dict[str, float]:
        """Decode speedup by prompt."""
        return {key: times.speedup for key, times in self.prompts.items()}

    def speedup(self) -> float:
        """Decode speedup of the totals: vanilla's seconds per token over the configuration's."""
        seconds = sum(median_over_repeats(times.seconds) for times in self.prompts.values())
        return self.vanilla_seconds_per_token * sum(t.tokens for t in self.prompts.values()) / seconds

    def interval(self, seed: int) -> Interval:
        """The speedup with its paired bootstrap interval over prompts."""
        times = list(self.prompts.values())
        return speedup_interval(
            [median_over_repeats(item.vanilla_seconds) for item in times],
            [median_over_repeats(item.seconds) for item in times],
            [item.vanilla_tokens for item in times],
            [item.tokens for item in times],
            seed=seed,
        )

    def round_ms(self) -> dict[str, float]:
        """Milliseconds of a mean round by part; `other` is the engine's own time between them."""
        rounds = self.rounds
        if not rounds.rounds:
            return {}
        parts = {
            name: getattr(rounds, f"{name}_seconds") * 1000 / rounds.rounds
            for name in ("draft", "verify", "accept", "cache")
        }
        whole = rounds.decode_seconds * 1000 / rounds.rounds
        return {**parts, "other": max(0.0, whole - sum(parts.values()))}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Measurement":
        """The inverse of `as_dict`, also after JSON made lists of tuples."""
        prompts = {key: PromptTimes(**_tuples(times)) for key, times in values["prompts"].items()}
        return cls(prompts, Rounds(**_tuples(values["rounds"])))


def measurement_from_cells(cells: Iterable[Cell], method: str) -> Measurement:
    """Pair the cells of `method` with vanilla's by prompt and repeat, the turns of a prompt together.

    Every prompt must be complete: each of its turns and repeats measured with both.
    """
    by_repeat: dict[tuple[str, int], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in sorted(cells, key=lambda cell: (cell.key.repeat, cell.key.turn)):
        by_repeat[f"{cell.key.task}/{cell.key.prompt_id}", cell.key.repeat][cell.key.method].append(cell)
    whole = Measurement()
    for (prompt, _), arms in by_repeat.items():
        vanilla, mine = arms[VANILLA], arms[method]
        assert len(vanilla) == len(mine), (
            f"{prompt}: {len(vanilla)} turns of vanilla, {len(mine)} of {method}"
        )
        times = PromptTimes(
            (sum(cell.decode_seconds for cell in vanilla),),
            (sum(cell.decode_seconds for cell in mine),),
            sum(cell.decode_tokens for cell in vanilla),
            sum(cell.decode_tokens for cell in mine),
            [cell.token_ids for cell in vanilla] == [cell.token_ids for cell in mine],
        )
        # An answer that ends with its first token decodes nothing, and has no time to compare.
        if times.vanilla_tokens and times.tokens:
            whole += Measurement({prompt: times}, _sum_rounds(mine))
    return whole


def _sum_rounds(cells: list[Cell]) -> Rounds:
    depths = conditional_acceptance(cell.rounds for cell in cells)
    return Rounds(
        rounds=sum(len(cell.acceptance_lengths) for cell in cells),
        produced=sum(sum(cell.acceptance_lengths) for cell in cells),
        decode_seconds=sum(cell.decode_seconds for cell in cells),
        draft_seconds=sum(cell.draft_seconds for cell in cells),
        verify_seconds=sum(cell.verify_seconds for cell in cells),
        accept_seconds=sum(cell.accept_seconds for cell in cells),
        cache_seconds=sum(cell.cache_seconds for cell in cells),
        reached=tuple(depth.reached for depth in depths),
        accepted=tuple(depth.accepted for depth in depths),
    )


def _join(first: PromptTimes, second: PromptTimes) -> PromptTimes:
    return PromptTimes(
        first.vanilla_seconds + second.vanilla_seconds,
        first.seconds + second.seconds,
        first.vanilla_tokens,
        first.tokens,
        first.same_tokens and second.same_tokens,
    )


def _add(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Elementwise, the shorter one filled with 0."""
    length = max(len(first), len(second))
    padded = [values + (0,) * (length - len(values)) for values in (first, second)]
    return tuple(a + b for a, b in zip(*padded, strict=True))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
