"""All of params.yaml, and what its sections must have in common."""

from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from eagle3.config.data import (
    PromptSettings,
    RegenerateSettings,
    TargetSettings,
    TaskSettings,
    VocabularySettings,
)
from eagle3.config.drafts import (
    HEAD_FAMILIES,
    MODEL_FAMILIES,
    DraftSettings,
    Eagle3Settings,
    EagleSettings,
    TrainSettings,
    changed_draft,
)
from eagle3.config.methods import EvaluateSettings, HeadMethod, ModelMethod, PromptLookupMethod
from eagle3.config.sections import DraftName, Name, NonNegative, Section
from eagle3.config.serving import ServingSettings
from eagle3.config.studies import StudySettings
from eagle3.config.sweep import SweepSettings


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
    drafts: Annotated[dict[DraftName, DraftSettings], Field(min_length=1)]
    evaluate: EvaluateSettings
    sweep: SweepSettings
    studies: StudySettings
    serving: ServingSettings
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
    def _servers_agree(self) -> Self:
        for experiment in self.serving.experiments:
            draft = experiment.draft
            if draft is not None and (
                draft not in self.drafts or self.drafts[draft].family not in HEAD_FAMILIES
            ):
                raise ValueError(
                    f"serving.experiments: {experiment.name!r} has draft {draft!r}, which is no draft of "
                    f"family {', '.join(HEAD_FAMILIES)}; name one of drafts"
                )
        if self.evaluate.engine != "native":
            for method in self.evaluate.methods:
                if not isinstance(method, HeadMethod):
                    raise ValueError(
                        f"evaluate.methods: method {method.name!r} has drafter {method.drafter!r}: "
                        f"{self.evaluate.engine} decodes with drafter 'head' alone; take it out, or set "
                        "evaluate.engine to native"
                    )
                if self.evaluate.engine == "vllm":
                    self._vllm_takes(f"evaluate.methods: method {method.name!r}", method.draft)
                    if method.tree.topk > 1:
                        raise ValueError(
                            f"evaluate.methods: method {method.name!r} has topk {method.tree.topk}, but vLLM "
                            "drafts chains only; set it to 1, or evaluate.engine to sglang"
                        )
        space = self.sweep.space
        if self.sweep.engine != "native" and len(space.threads) * len(space.draft_dtypes) > 1:
            raise ValueError(
                f"sweep.space: threads {list(space.threads)} and draft_dtypes {list(space.draft_dtypes)} "
                f"cannot be varied with engine {self.sweep.engine}; give one value each"
            )
        if self.sweep.engine != "native" and self.sweep.batch_size > 1:
            raise ValueError(
                f"sweep.batch_size: {self.sweep.batch_size}, but a sweep of {self.sweep.engine} sends one "
                "request at a time; set it to 1"
            )
        if self.sweep.engine != "native" and any(space.confidences):
            raise ValueError(
                f"sweep.space.confidences: {list(space.confidences)}, but {self.sweep.engine} drafts every "
                "tree whole; set it to [0.0]"
            )
        if self.sweep.engine == "vllm" and space.max_topk > 1:
            raise ValueError(
                f"sweep.space.max_topk: {space.max_topk}, but vLLM drafts chains only; set it to 1"
            )
        if self.sweep.engine == "vllm":
            for draft in space.drafts:
                self._vllm_takes("sweep.space.drafts", draft)
        return self

    def _vllm_takes(self, place: str, draft: str) -> None:
        if draft in self.drafts and self.drafts[draft].family == "eagle":
            raise ValueError(
                f"{place}: draft {draft!r} is of family eagle, whose fc has a bias, and vLLM's has none; "
                "take a draft of family eagle3, or engine sglang"
            )

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
            families = MODEL_FAMILIES if isinstance(method, ModelMethod) else HEAD_FAMILIES
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
            ("serving", self.serving.tasks),
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
