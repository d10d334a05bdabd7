"""The experiments of params.yaml on one engine: latency, throughput, acceptance, agreement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from eagle3 import paths
from eagle3.config import ServedExperiment, Settings
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.generation import Decoder
from eagle3.decoding.tree import TreeShape
from eagle3.measure.bench import Bench
from eagle3.measure.lock import timing_lock
from eagle3.measure.prompts import task_prompts
from eagle3.measure.rendering import ChatRenderer
from eagle3.models.target import Target
from eagle3.provenance import describe_run, fingerprint_machine, hash_tree
from eagle3.serving.agreement import agree, state_difference
from eagle3.serving.bench import settle, speculation_of
from eagle3.serving.client import Client
from eagle3.serving.engines import Engine, Speculation
from eagle3.serving.load import answer_all
from eagle3.serving.metrics import reconcile, reconcile_average, summarise
from eagle3.serving.results import read_part, with_earlier, write_part
from eagle3.serving.servers import WHOLE_PREFILL, Servers
from eagle3.tracking import Tracker

Prompts = list[tuple[str, list[int]]]  # name and token ids
# SGLang returns the states that a draft reads when started with these; of cached prefixes it returns none.
_STATES_OPTIONS = {"enable-return-hidden-states": True, **WHOLE_PREFILL["sglang"]}


def speculation_for(engine: Engine, experiment: ServedExperiment) -> Speculation | None:
    """What an experiment asks of an engine: its tree, or for vLLM the chain of the tree's levels."""
    if experiment.draft is None or experiment.tree is None:
        return None
    tree, folder = experiment.tree, paths.DRAFTS / experiment.draft
    if engine == "vllm":
        return speculation_of(folder, tree.num_steps, 1, tree.num_steps + 1)
    return speculation_of(folder, **tree.model_dump())


def measure_engine(
    settings: Settings, engine: Engine, experiments: Sequence[ServedExperiment], device: str
) -> dict[str, Any]:
    """Measure the experiments one server after the other; writes the engine's part of reports/serving.json.

    The part is written after every experiment, and keeps the rows of others that were measured alike. An
    experiment whose server does not start is recorded with the reason, and the others go on.

    Raises:
        ValueError: before anything starts, if a draft is missing; at the end, if none could be measured.
    """
    dtype = settings.evaluate.dtype
    speculations = [speculation_for(engine, experiment) for experiment in experiments]
    exact = dtype == "float32"  # else differences are rounding's, and say nothing: the native engine is idle
    target = Target.load(paths.TARGET, getattr(torch, dtype), device if exact else "cpu")
    if exact:
        settle(target)
    bench, prompts = Bench(target, paths.DRAFTS, target.dtype), _prompts(settings, target)
    earlier = read_part(paths.SERVING, engine)
    part = {**_conditions(settings, engine, len(prompts)), "hidden_state_difference": None, "experiments": []}
    rows: list[dict[str, Any]] = part["experiments"]
    with ExitStack() as stack:
        stack.enter_context(timing_lock())
        servers = stack.enter_context(Servers(settings, engine))
        for experiment, speculation in zip(experiments, speculations, strict=True):
            name = experiment.name
            try:
                url = servers.url(name, speculation, experiment.compile, WHOLE_PREFILL[engine])
                with servers.explaining(name):
                    native = native_decoder(bench, speculation) if exact else None
                    row = _measure(settings, engine, url, experiment, speculation, prompts, native)
                part["version"] = row.pop("version")
            except ValueError as error:
                print(f"{name} on {engine}: {error}")
                rows.append({"name": name, "unavailable": str(error).splitlines()[0]})
            else:
                rows.append(row)
                print(_line(row))
            servers.stop(name)
            if part["version"]:
                write_part(paths.SERVING, engine, with_earlier(part, earlier))
        if not part["version"]:
            raise ValueError(f"no experiment could be measured on {engine}; the reasons are above")
        if exact:
            try:
                part["hidden_state_difference"] = _states(engine, experiments, servers, prompts, target)
            except ValueError as error:
                print(f"hidden states on {engine}: {error}")
    result = with_earlier(part, earlier)
    write_part(paths.SERVING, engine, result)
    _track(settings, engine, result)
    print(f"{paths.SERVING} has {engine}'s part")
    return result


def _conditions(settings: Settings, engine: Engine, prompts: int) -> dict[str, Any]:
    """What all rows have in common; the version is known when a server runs."""
    wanted = settings.serving
    own = wanted.engine(engine)
    drafts = {item.draft for item in wanted.experiments if item.draft is not None}
    return {
        "version": "",
        "dtype": settings.evaluate.dtype,
        "timed": own.timed,
        "tasks": list(wanted.tasks),
        "prompts": prompts,
        "max_new_tokens": wanted.max_new_tokens,
        "machine": fingerprint_machine(),
        "origin": {
            **describe_run(paths.REPORTS.resolve().parent, f"python experiments/serving.py measure {engine}"),
            # All that servers are started with, as the file has it: a tuple is a list there.
            "options": json.loads(json.dumps({**own.options, **WHOLE_PREFILL[engine]})),
            "urls": sorted(own.urls),  # the experiments whose servers ran already, with options of their own
            "environment": sorted(own.environment),
            "target": hash_tree(paths.TARGET),
            "drafts": {
                name: hash_tree(paths.DRAFTS / name)
                for name in sorted(drafts)
                if (paths.DRAFTS / name).is_dir()
            },
        },
    }


def native_decoder(bench: Bench, speculation: Speculation | None) -> Decoder:
    """This project's decoder with the same tree and the bench's draft of that name."""
    if speculation is None:
        return bench.vanilla()
    drafter = EagleDrafter(bench.head(speculation.draft.name), TreeShape(**speculation.tree))
    return SpeculativeDecoder(bench.target, drafter, "native")


def _prompts(settings: Settings, target: Target) -> Prompts:
    """The first turns of the held-out prompts, as the native engine would decode them."""
    wanted = settings.serving
    renderer = ChatRenderer(target.tokenizer, target.eos_token_ids)
    return [
        ("/".join(prompt.key), renderer(prompt, []))
        for prompt in task_prompts(paths.TASKS, wanted.tasks, "held_out", wanted.prompts_per_task)
    ]


def _measure(
    settings: Settings,
    engine: Engine,
    url: str,
    experiment: ServedExperiment,
    speculation: Speculation | None,
    prompts: Prompts,
    native: Decoder | None,
) -> dict[str, Any]:
    """One experiment on a running server: every level of concurrency, the counters, the agreement with the
    native engine where there is one to compare with.
    """
    wanted, client = settings.serving, Client(engine, url)
    ids = [item for _, item in prompts]
    lengths = [len(item) for item in ids]
    depth = None if speculation is None else speculation.num_steps
    # Untimed, to warm it up.
    given, _ = answer_all(engine, url, ids[:2], min(8, wanted.max_new_tokens), 1)
    levels, single = [], None
    for concurrency in wanted.concurrency:
        before = client.prometheus()
        answers, seconds = answer_all(engine, url, ids, wanted.max_new_tokens, concurrency)
        counters = reconcile(engine, answers, before, client.prometheus(), speculation is not None)
        levels.append(
            {"concurrency": concurrency, **summarise(answers, lengths, seconds, depth), "counters": counters}
        )
        given += answers
        single = answers if concurrency == 1 else single
    if single is None:
        single, _ = answer_all(engine, url, ids, wanted.max_new_tokens, 1)
        given += single
    row: dict[str, Any] = {
        "name": experiment.name,
        "version": client.version(),
        "draft": experiment.draft,
        "tree": None if speculation is None else speculation.tree,
        "compile": experiment.compile,
        "levels": levels,
        "agreement": None
        if native is None
        else agree(native, prompts, single, wanted.max_new_tokens).as_dict(),
    }
    # The average of a server that ran before is of other requests, too.
    if engine == "sglang" and speculation is not None and experiment.name not in settings.serving.sglang.urls:
        states = client.server_info().get("internal_states") or [{}]
        average = reconcile_average(given, states[0].get("avg_spec_accept_length"))
        row["server_accept_length"] = average
        if average is not None and not average["agree"]:
            print(
                f"{experiment.name}: {average['server']:.2f} tokens a verification by {url}/server_info, "
                f"{average['requests']:.2f} by its answers"
            )
    return row


def _states(
    engine: Engine,
    experiments: Sequence[ServedExperiment],
    servers: Servers,
    prompts: Prompts,
    target: Target,
) -> float | None:
    """The largest difference of captured states over all prompts; None where none can be had."""
    experiment = next((item for item in experiments if _reads_captured(item)), None)
    if engine != "sglang" or experiment is None:
        return None
    url = servers.url("hidden-states", speculation_for(engine, experiment), options=_STATES_OPTIONS)
    client = Client(engine, url)
    difference = max(state_difference(target, ids, client.hidden_states(ids)) for _, ids in prompts)
    servers.stop("hidden-states")
    print(f"captured hidden states differ by at most {difference:.1e} of their layer's largest")
    return difference


def _reads_captured(experiment: ServedExperiment) -> bool:
    if experiment.draft is None:
        return False
    config: Path = paths.DRAFTS / experiment.draft / "config.json"
    return "Eagle3" in json.loads(config.read_text(encoding="utf-8"))["architectures"][0]


def _line(row: dict[str, Any]) -> str:
    first, agreement = row["levels"][0], row["agreement"]
    tau = "" if first["tau"] is None else f"  tau {first['tau']:.2f}"
    each = first["time_per_output_token_ms"]
    then = "" if each is None else f", then {each['median']:.1f} ms a token"
    compared = (
        "not compared with the native engine, which float32 alone allows"
        if agreement is None
        else f"tokens as here: {agreement['tokens_equal']}, rounds: {agreement['acceptance_equal']}"
    )
    took = first["time_to_first_token_ms"]["median"]
    return f"{row['name']:<16} first token {took:.0f} ms{then}{tau}; {compared}"


def _track(settings: Settings, engine: Engine, result: dict[str, Any]) -> None:
    """A run for the engine, and one for each experiment with metrics of equal names."""
    tracker = Tracker.open(settings)
    keys = ("tokens_equal", "acceptance_equal", "hidden_states_equal", "version")
    with tracker.run("serving", engine) as run:
        run.log_params(settings.serving.model_dump(mode="json"))
        run.log_tags({"engine": engine, **{key: str(result[key]) for key in keys}})
        run.log_artifact(paths.SERVING)
        for row in result["experiments"]:
            with tracker.run("serving", f"{engine} {row['name']}", parent=run, method=row["name"]) as child:
                child.log_params({key: row.get(key) for key in ("draft", "tree", "compile", "unavailable")})
                for level in row.get("levels", ()):
                    numbers = {
                        key: value for key, value in level.items() if key not in ("counters", "concurrency")
                    }
                    child.log_history([{"step": level["concurrency"], **numbers}])
