"""Settings of an evaluation, checked before anything is measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eagle3.measure.losslessness import tie_tolerance


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is measured, and how often.

    `tie_tolerance` is in logit units; None takes the dtype's (`losslessness.TIE_TOLERANCE`). `on_failure`
    says what a generation that raises does: "fail" ends the run, "exclude" leaves its prompt out for every
    method and counts it. Raises ValueError for values that cannot be measured with.
    """

    max_new_tokens: int
    dtype: str
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    repeats: int = 3
    seed: int = 0
    tie_tolerance: float | None = None
    on_failure: Literal["fail", "exclude"] = "fail"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}: the first token comes from the prefill, "
                "so that decoding needs at least 2"
            )
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}: give at least 1, and 3 or more for a median")
        if not self.temperatures or any(temperature < 0 for temperature in self.temperatures):
            raise ValueError(
                f"temperatures is {self.temperatures}: give one or more numbers of at least 0, 0 for greedy"
            )
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures is {self.temperatures}: name every temperature once")
        if self.tie_tolerance is None:
            tie_tolerance(self.dtype)
        elif self.tie_tolerance < 0:
            raise ValueError(f"tie_tolerance is {self.tie_tolerance}: give a number of at least 0")

    @property
    def tolerance(self) -> float:
        """The near-tie tolerance in force, in logit units."""
        return tie_tolerance(self.dtype) if self.tie_tolerance is None else self.tie_tolerance

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the tolerance in force."""
        values: Mapping[str, Any] = asdict(self)
        return {**values, "temperatures": list(self.temperatures), "tie_tolerance": self.tolerance}
