"""Servers of SGLang and vLLM."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from eagle3.config.methods import TreeSettings
from eagle3.config.sections import (
    Count,
    Name,
    NewTokens,
    Positive,
    Section,
    ServingEngine,
    Tasks,
    Text,
    Url,
    repeated,
)


class EngineSettings(Section):
    """A serving engine in an environment of its own.

    ``options`` are further flags in the engine's names, ``environment`` further variables; ``urls`` names
    servers that run already by the experiment (or method) that they serve, for which nothing is started.
    ``timed`` false keeps times out of the report, where kernels are stand-ins.
    """

    python: Text
    timed: bool
    options: dict[str, bool | int | float | str | tuple[int | float | str, ...] | None]
    environment: dict[str, str]
    urls: dict[Name, Url]


class ServedExperiment(Section):
    """What one server serves: vanilla, or a draft with a tree; engines that draft chains take its levels.

    ``compile`` null is what the engine does by itself: SGLang does not compile, vLLM does and captures CUDA
    graphs; false keeps it from both, there.
    """

    name: Name
    draft: Name | None
    tree: TreeSettings | None
    compile: bool | None

    @model_validator(mode="after")
    def _draft_and_tree_go_together(self) -> Self:
        if (self.draft is None) != (self.tree is None):
            raise ValueError(
                f"experiment {self.name!r} has draft {self.draft!r} and tree {self.tree!r}: give both, or "
                "null for both to serve vanilla"
            )
        return self


class ServingSettings(Section):
    """Servers: where they listen, and what experiments/serving.py measures of them."""

    host: Text
    port: Annotated[int, Field(ge=0, le=65535)]  # 0: a free one
    start_timeout: Positive  # seconds
    tasks: Tasks
    prompts_per_task: Count
    max_new_tokens: NewTokens
    concurrency: Annotated[tuple[Count, ...], Field(min_length=1)]
    experiments: Annotated[tuple[ServedExperiment, ...], Field(min_length=1)]
    sglang: EngineSettings
    vllm: EngineSettings

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        if doubled := repeated(experiment.name for experiment in self.experiments):
            raise ValueError(
                f"experiments: name {doubled[0]!r} is taken: every experiment needs a name of its own"
            )
        return self

    def engine(self, name: ServingEngine) -> EngineSettings:
        """The settings of an engine."""
        return self.sglang if name == "sglang" else self.vllm
