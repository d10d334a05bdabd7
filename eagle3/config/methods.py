"""Methods of decoding, one row of the comparison each, and what is evaluated."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from eagle3.config.sections import (
    Backend,
    Count,
    DraftDtype,
    Dtype,
    Engine,
    Name,
    NewTokens,
    NonNegative,
    Section,
    Tasks,
    Temperature,
    TopP,
    repeated,
)

if TYPE_CHECKING:
    from eagle3.decoding.tree import StaticTree, TreeShape


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

    tasks: Tasks
    prompts_per_task: Count
    max_new_tokens: NewTokens
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)]
    top_k: NonNegative
    top_p: TopP
    repeats: Count
    on_failure: Literal["fail", "exclude"]  # exclude: a prompt that fails is left out everywhere, and counted
    dtype: Dtype
    draft_dtype: DraftDtype  # of the drafts' weights: changes their speed and acceptance, never the output
    threads: NonNegative
    engine: Engine
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
        if doubled := repeated([*names, "vanilla", "vanilla-aa", "tuned"]):
            raise ValueError(f"method name {doubled[0]!r} is taken: every method needs a name of its own")
        for method in self.methods:
            if isinstance(method, HybridMethod | PromptLookupMethod) and method.min_ngram > method.max_ngram:
                raise ValueError(
                    f"method {method.name!r} has min_ngram {method.min_ngram} above max_ngram "
                    f"{method.max_ngram}: need min_ngram <= max_ngram"
                )
        for key in ("tasks", "temperatures"):
            values = getattr(self, key)
            if repeated(values):
                raise ValueError(f"{key} has {list(values)}: name each of them once")
        return self
