"""Studies beside the pipeline."""

from typing import Annotated, Any

from pydantic import Field

from eagle3.config.methods import TreeSettings
from eagle3.config.sections import Count, Name, NewTokens, NonNegative, Positive, Section, Tasks


class AblationSettings(Section):
    """One thing changed at a time in an EAGLE-3 draft, all trained on the same rows."""

    draft: Name
    train_tokens: NonNegative  # distinct; 0: all rows
    token_budget: Count
    variants: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]  # by name, keys of the draft


class ScalingSettings(Section):
    """The same drafts on more and more data."""

    drafts: Annotated[tuple[Name, ...], Field(min_length=1)]
    train_tokens: Annotated[tuple[Count, ...], Field(min_length=2)]  # distinct
    epochs: Positive


class StudyEvaluation(Section):
    """How the drafts of a study are decoded with, at temperature 0."""

    tasks: Tasks
    prompts_per_task: Count
    max_new_tokens: NewTokens
    repeats: Count
    tree: TreeSettings


class StudySettings(Section):
    """Trainings beside the pipeline: experiments/study.py."""

    ablation: AblationSettings
    scaling: ScalingSettings
    evaluate: StudyEvaluation
