"""The sweep of trees."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from eagle3.config.sections import (
    Backend,
    Count,
    DraftDtype,
    Engine,
    Name,
    NewTokens,
    NonNegative,
    Section,
    Share,
    Tasks,
    Temperature,
)


class SpaceSettings(Section):
    """What a sweep may choose. An option with one value is not tuned; ``threads`` 0 is torch's choice."""

    drafts: Annotated[tuple[Name, ...], Field(min_length=1)]
    max_num_steps: Count
    max_topk: Count
    max_num_draft_tokens: Annotated[int, Field(ge=2)]
    draft_dtypes: Annotated[tuple[DraftDtype, ...], Field(min_length=1)]
    threads: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    backends: Annotated[tuple[Backend, ...], Field(min_length=1)]
    confidences: Annotated[tuple[Share, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _longest_chain_fits(self) -> Self:
        if self.max_num_draft_tokens <= self.max_num_steps:
            raise ValueError(
                f"max_num_draft_tokens = {self.max_num_draft_tokens}: a chain of max_num_steps = "
                f"{self.max_num_steps} needs {self.max_num_steps + 1}; raise it, or lower max_num_steps"
            )
        return self


class GridSettings(Section):
    """The points of ``--sampler grid``; combinations that are no tree are left out."""

    num_steps: Annotated[tuple[Count, ...], Field(min_length=1)]
    topk: Annotated[tuple[Count, ...], Field(min_length=1)]
    num_draft_tokens: Annotated[tuple[Count, ...], Field(min_length=1)]


class FinalSettings(Section):
    """The second measurement, of the ``finalists`` best against the defaults, on held-out prompts."""

    finalists: Count
    prompts_per_task: Count
    max_new_tokens: NewTokens
    repeats: Count


class SweepSettings(Section):
    """Tuning by measured speed; ``early_stop`` is the chance that a trial as good as the best is stopped.

    ``batch_size``: requests decoded together, vanilla's too; another batch has another best tree.
    """

    tasks: Tasks
    prompts_per_task: Count
    max_new_tokens: NewTokens
    repeats: Count
    temperature: Temperature
    early_stop: Share
    engine: Engine
    batch_size: Count
    space: SpaceSettings
    grid: GridSettings
    held_out: FinalSettings
