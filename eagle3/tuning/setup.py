"""A sweep as params.yaml describes it: space, first trials, workload, and what the times depend on."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eagle3 import paths, serving
from eagle3.config import Settings
from eagle3.measure.bench import Bench, evaluated_target
from eagle3.measure.evaluation import code_digest
from eagle3.measure.prompts import task_prompts
from eagle3.measure.rendering import ChatRenderer, Prompt
from eagle3.measure.settings import EvaluationSettings
from eagle3.measure.verdict import reservations
from eagle3.provenance import fingerprint_machine, hash_object, hash_tree, short_hash
from eagle3.serving.bench import ServedBench
from eagle3.tuning.defaults import default_configurations, trials_to_enqueue
from eagle3.tuning.finalists import Finalist, Outcome, Ranking, choose_finalists, decide, fastest_default
from eagle3.tuning.space import Space
from eagle3.tuning.study import Study, ranked
from eagle3.tuning.trial import Workload
from eagle3.tuning.workbench import Workbench


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
        identity = identity_of(settings, marks)
        study = Study.open(name, storage, space, identity, sampler, seed)
        again = study.without_result(study.records())  # whatever it failed for may be mended
        for source, configuration in trials_to_enqueue(settings, space, sampler):
            study.enqueue(configuration, source, even_if_known=configuration in again)
        return cls(settings, space, bench, workload, study, marks, identity)

    def finalists(self) -> list[Finalist]:
        """The best trials and the defaults; empty where no trial was measured in full."""
        ranking = ranked(self.study.records())
        return held_out_finalists(self.settings, self.space, ranking) if ranking else []

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
            held_out_prompts(self.settings),
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
        verdict = report["verdict"]
        return replace(
            outcome,
            summary=f"{outcome.summary} {verdict['summary']}",
            reservations=tuple(reservations(verdict)),
        )


def held_out_finalists(settings: Settings, space: Space, ranking: Ranking) -> list[Finalist]:
    """The best of the ranking, which may be empty, and the defaults that they are measured against."""
    defaults = default_configurations(settings, space)
    if settings.sweep.engine != "native":
        # Each is a server beside the others, on one GPU as a rule: the fastest default stands for all.
        defaults = fastest_default(ranking, defaults)
    return choose_finalists(ranking, defaults, space, settings.sweep.held_out.finalists)


def make_space(settings: Settings) -> Space:
    """The space that params.yaml describes."""
    return Space(**dict(settings.sweep.space))


def load_workbench(settings: Settings, device: str, stack: ExitStack) -> Workbench:
    """The target as params.yaml evaluates it, ready to make decoders."""
    target = evaluated_target(settings.evaluate, device)
    bench = Bench(target, paths.DRAFTS, target.dtype)
    if settings.sweep.engine != "native":
        bench = ServedBench.start(settings, settings.sweep.engine, target, stack)
    return Workbench(bench, settings.sweep.space.threads != (0,), settings.sweep.batch_size)


def tuning_prompts(settings: Settings) -> list[Prompt]:
    """The first tuning prompts of every task."""
    return task_prompts(paths.TASKS, settings.sweep.tasks, "tuning", settings.sweep.prompts_per_task)


def held_out_prompts(settings: Settings) -> list[Prompt]:
    """From the other end than evaluation's: its "tuned" row is not measured on what chose it."""
    wanted = settings.sweep
    return task_prompts(
        paths.TASKS, wanted.tasks, "held_out", wanted.held_out.prompts_per_task, from_end=True
    )


def tuning_workload(settings: Settings, bench: Workbench) -> Workload:
    """What every trial decodes."""
    wanted = settings.sweep
    return Workload(
        tuning_prompts(settings),
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


def identity_of(settings: Settings, marks: Mapping[str, Any]) -> dict[str, Any]:
    """All that a trial's times depend on beside its configuration; `marks` is the `fingerprint`."""
    wanted = settings.sweep
    return {
        **marks,
        "space": asdict(make_space(settings)),
        "workload": {
            **_measuring(settings, wanted.max_new_tokens, wanted.repeats).as_dict(),
            "prompts": hash_object([vars(prompt) for prompt in tuning_prompts(settings)]),
            "vanilla_threads": settings.evaluate.threads,
        },
        "code": code_digest(),
        **served_identity(settings),
    }


def served_identity(settings: Settings) -> dict[str, Any]:
    """What the times of a served sweep depend on and can be known before a server starts."""
    engine = settings.sweep.engine
    if engine == "native":
        return {}
    own = settings.serving.engine(engine).model_dump(mode="json")
    return {
        "serving": {
            **{key: own[key] for key in ("python", "options", "urls")},
            # Hashed: tokens and passwords are among them, and a study may be shared.
            "environment": {name: short_hash(value) for name, value in own["environment"].items()},
            "code": hash_tree(Path(serving.__file__).parent),
        }
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
