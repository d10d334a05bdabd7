"""Configurations that are known before anything is measured: the defaults to beat, first trials, the grid."""

import random
from dataclasses import replace
from typing import Any

from eagle3.config import HeadMethod, Settings
from eagle3.tuning.space import VANILLA_LIKE, Configuration, Space

Named = list[tuple[str, Configuration]]


def default_configurations(settings: Settings, space: Space) -> dict[str, Configuration]:
    """What a winner has to beat: well-known trees, and those that params.yaml evaluates with these drafts.

    Their sizes are within the space's; their options need not be. A tree that ends early by confidence is
    nobody's default, and the winner has to beat a method as it is evaluated.
    """
    found = space.known()
    for method in settings.evaluate.methods:
        if not isinstance(method, HeadMethod) or method.draft not in space.drafts:
            continue
        tree = method.tree
        configuration = replace(
            space.default((tree.num_steps, tree.topk, tree.num_draft_tokens)),
            draft=method.draft,
            backend=method.backend,
            **_evaluated_options(settings, space, method),
        )
        if space.has_tree(configuration):
            found[f"{method.name} of params.yaml"] = configuration
    return found


def _evaluated_options(settings: Settings, space: Space, method: HeadMethod) -> dict[str, Any]:
    """Dtype and threads as evaluated; those of the space where they change nothing."""
    if settings.sweep.engine != "native":
        return {}
    evaluated = settings.evaluate
    # Threads 0 is the evaluation's number: see `Workbench`.
    options: dict[str, Any] = {"threads": 0 if 0 in space.threads else evaluated.threads}
    if method.backend == "kernels":  # the others hold the draft's weights in the target's dtype
        options["draft_dtype"] = evaluated.draft_dtype
    return options


def trials_to_enqueue(settings: Settings, space: Space, sampler: str) -> Named:
    """What is tried before anything is sampled: the known trees, or the whole grid."""
    return grid_trials(settings, space) if sampler == "grid" else first_trials(settings, space)


def first_trials(settings: Settings, space: Space) -> Named:
    """Tried before anything is sampled, where in the space: (who chose it, configuration), each once."""
    named = {"vanilla-like": space.default(VANILLA_LIKE), **default_configurations(settings, space)}
    by_configuration: dict[Configuration, str] = {}
    for name, configuration in named.items():
        if space.contains(configuration):
            by_configuration.setdefault(configuration, name)
    return [(name, configuration) for configuration, name in by_configuration.items()]


def grid_trials(settings: Settings, space: Space) -> Named:
    """The grid in random order, so that any part of it is a fair sample."""
    points = space.grid(**dict(settings.sweep.grid))
    if not points:
        raise ValueError(
            "sweep.grid: none of its points is a tree of sweep.space; num_draft_tokens - 1 must be from "
            "num_steps to topk + (num_steps - 1) * topk**2"
        )
    random.Random(settings.seed).shuffle(points)
    return [("grid", point) for point in points]
