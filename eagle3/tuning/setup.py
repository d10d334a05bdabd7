"""A sweep as params.yaml describes it: space, first trials, workload, and what the times depend on."""

import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eagle3 import paths
from eagle3.config import HeadMethod, Settings
from eagle3.measure.bench import Bench, evaluated_target
from eagle3.measure.evaluation import code_digest
from eagle3.measure.prompts import task_prompts
from eagle3.measure.rendering import ChatRenderer
from eagle3.measure.settings import EvaluationSettings
from eagle3.provenance import fingerprint_machine, hash_object, hash_tree
from eagle3.serving.bench import ServedBench
from eagle3.tuning.finalists import Finalist, Outcome, choose_finalists, decide
from eagle3.tuning.space import VANILLA_LIKE, Configuration, Space
from eagle3.tuning.study import Study, ranked
from eagle3.tuning.trial import Workload
from eagle3.tuning.workbench import Workbench

Named = list[tuple[str, Configuration]]


@dataclass(frozen=True)
class Session:
    """A sweep ready to run: its study, what it decodes with, and what it decodes.

    `marks` are machine, target and drafts; `identity` is all that the trials' times depend on.
    """

    settings: Settings
    space: Space
    bench: Workbench
    workload: Workload
    study: Study
    marks: Mapping[str, Any]
    identity: Mapping[str, Any]

    @classmethod
    def open(
        cls,
        settings: Settings,
        name: str,
        storage: str,
        sampler: str,
        seed: int,
        device: str,
        stack: ExitStack,
    ) -> "Session":
        """Load the target, and make or resume the study. To be called while holding the timing lock.

        `stack` ends the servers of a served sweep.

        Raises:
            ValueError: if something is missing, or the study was measured under other conditions.
        """
        space, marks = make_space(settings), fingerprint(settings)
        bench = load_workbench(settings, device, stack)
        workload = tuning_workload(settings, bench)
        identity = identity_of(settings, space, workload, marks)
        study = Study.open(name, storage, space, identity, sampler, seed)
        for source, configuration in trials_to_enqueue(settings, space, sampler):
            study.enqueue(configuration, source)
        return cls(settings, space, bench, workload, study, marks, identity)

    def finalists(self) -> list[Finalist]:
        """The best trials and the defaults; empty where no trial was measured in full."""
        ranking = ranked(self.study.records())
        defaults = default_configurations(self.settings, self.space)
        count = self.settings.sweep.held_out.finalists
        return choose_finalists(ranking, defaults, self.space, count) if ranking else []

    def measure_finalists(
        self, finalists: list[Finalist], folder: Path, origin: Mapping[str, Any]
    ) -> Outcome:
        """Evaluate the finalists on held-out prompts, with everything an evaluation checks, and decide.

        Args:
            folder: for evaluation.json, per_prompt.parquet, and the journal that a killed run resumes from.
            origin: recorded with the settings.
        """
        wanted, bench = self.settings.sweep.held_out, self.bench
        report = bench.evaluate(
            [bench.vanilla(), *(bench.decoder(item.configuration, item.name) for item in finalists)],
            # From the other end than evaluation: its "tuned" row is not measured on what chose it.
            task_prompts(
                paths.TASKS, self.settings.sweep.tasks, "held_out", wanted.prompts_per_task, from_end=True
            ),
            _measuring(self.settings, wanted.max_new_tokens, wanted.repeats),
            machine=self.marks["machine"],
            subject={
                **{key: self.marks[key] for key in ("target", "drafts")},
                "configurations": {item.name: item.configuration.as_dict() for item in finalists},
                "device": str(bench.target.device),
                "threads": torch.get_num_threads(),
            },
            reports=folder,
            journal=folder / "journal.jsonl",
            origin=origin,
            trees={item.name: item.configuration.tree for item in finalists},
        )
        overall = [row for row in report["results"] if row["task"] == "all"]
        table = pd.read_parquet(folder / "per_prompt.parquet")
        outcome = decide(finalists, overall, table, self.settings.seed)
        return replace(outcome, summary=f"{outcome.summary} {report['verdict']['summary']}")


def make_space(settings: Settings) -> Space:
    """The space that params.yaml describes."""
    return Space(**dict(settings.sweep.space))


def default_configurations(settings: Settings, space: Space) -> dict[str, Configuration]:
    """What a winner has to beat: well-known trees, and those that params.yaml evaluates with these drafts."""
    found = space.known()
    for method in settings.evaluate.methods:
        if not isinstance(method, HeadMethod):
            continue
        tree = method.tree
        shape = (tree.num_steps, tree.topk, tree.num_draft_tokens)
        configuration = replace(space.default(shape), draft=method.draft, backend=method.backend)
        if space.contains(configuration):
            found[f"{method.name} of params.yaml"] = configuration
    return found


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


def load_workbench(settings: Settings, device: str, stack: ExitStack) -> Workbench:
    """The target as params.yaml evaluates it, ready to make decoders."""
    target = evaluated_target(settings.evaluate, device)
    bench = Bench(target, paths.DRAFTS, target.dtype)
    if settings.sweep.engine != "native":
        bench = ServedBench.start(settings, settings.sweep.engine, target, stack)
    return Workbench(bench, len(settings.sweep.space.threads) > 1, settings.sweep.batch_size)


def tuning_workload(settings: Settings, bench: Workbench) -> Workload:
    """What every trial decodes: the first tuning prompts of every task."""
    wanted = settings.sweep
    return Workload(
        task_prompts(paths.TASKS, wanted.tasks, "tuning", wanted.prompts_per_task),
        ChatRenderer(bench.target.tokenizer, bench.target.eos_token_ids),
        _measuring(settings, wanted.max_new_tokens, wanted.repeats),
    )


def fingerprint(settings: Settings) -> dict[str, Any]:
    """What times belong to beside a configuration; `best.read_best` compares it."""
    return {
        "machine": fingerprint_machine(),
        "target": hash_tree(paths.TARGET),
        "drafts": {name: hash_tree(paths.DRAFTS / name) for name in settings.sweep.space.drafts},
        "engine": settings.sweep.engine,
        "batch_size": settings.sweep.batch_size,
    }


def identity_of(
    settings: Settings, space: Space, workload: Workload, marks: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a trial's times depend on beside its configuration; `marks` is the `fingerprint`."""
    return {
        **marks,
        "space": asdict(space),
        "workload": {
            **workload.settings.as_dict(),
            "prompts": hash_object([vars(prompt) for prompt in workload.prompts]),
            "vanilla_threads": settings.evaluate.threads,
        },
        "code": code_digest(),
    }


def _measuring(settings: Settings, max_new_tokens: int, repeats: int) -> EvaluationSettings:
    return EvaluationSettings(
        max_new_tokens=max_new_tokens,
        dtype=settings.evaluate.dtype,
        temperatures=(settings.sweep.temperature,),
        top_k=settings.evaluate.top_k,
        top_p=settings.evaluate.top_p,
        repeats=repeats,
        seed=settings.seed,
    )
