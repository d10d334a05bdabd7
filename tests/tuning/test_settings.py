"""A sweep section that cannot work is refused before anything starts; the rest becomes space and grid."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3.config import Settings, parse_settings
from eagle3.decoding.sampling import Sampling
from eagle3.measure.prompts import task_prompts
from eagle3.measure.records import changed_keys
from eagle3.parameters import SettingsError, read_profile
from eagle3.provenance import write_jsonl
from eagle3.tuning import setup
from eagle3.tuning.defaults import default_configurations, first_trials, grid_trials
from eagle3.tuning.setup import make_space, served_identity
from eagle3.tuning.workbench import WithThreads
from tests.measure.fakes import FakeDecoder

PROFILES = Path(__file__).parents[2] / "profiles"


def settings(*path: str, value: Any = None) -> Settings:
    """The default profile, with one value of the section `sweep` replaced."""
    values = copy.deepcopy(read_profile("default", PROFILES))
    inner = values["sweep"]
    for key in path[:-1]:
        inner = inner[key]
    if path:
        inner[path[-1]] = value
    return parse_settings(values)


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("space", "drafts"), ["egale"], ["sweep.space.drafts", "'egale'", "eagle, small, eagle3"]),
        (("tasks",), ["chess"], ["sweep.tasks", "'chess'", "tasks.names"]),
        (("space", "max_num_draft_tokens"), 8, ["sweep.space", "max_num_steps = 8", "needs 9"]),
        (("batch_size",), 0, ["sweep.batch_size", "at least 1"]),
        (("space", "confidences"), [0.0, 1.0], ["sweep.space.confidences", "less than 1"]),
        (("early_stop",), 1.0, ["sweep.early_stop", "less than 1"]),
    ],
)
def test_refusal_names_key_value_and_remedy(path: tuple[str, ...], value: Any, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(*path, value=value)
    for part in parts:
        assert part in str(caught.value)


def test_default_profile_tries_what_others_use_first() -> None:
    wanted = settings()
    space = make_space(wanted)
    first = {space.label(item): name for name, item in first_trials(wanted, space)}
    assert list(first)[:5] == ["1/1/2", "3/1/4", "5/4/8", "7/10/60", "5/8/64"]  # then the profile's own
    assert "1/1/2" not in {space.label(item) for item in default_configurations(wanted, space).values()}


def test_defaults_are_drafted_whole_and_have_to_be_beaten_whatever_the_space() -> None:
    """A default that ends early by confidence is nobody's default."""
    wanted = settings("space", "confidences", value=[0.3, 0.0])
    first = [item for _, item in first_trials(wanted, make_space(wanted))]
    assert first
    assert all(item.confidence == 0 for item in first)
    wanted = settings("space", "confidences", value=[0.3])
    space = make_space(wanted)
    assert first_trials(wanted, space) == []
    defaults = default_configurations(wanted, space)
    assert set(defaults) == set(default_configurations(settings(), make_space(settings())))
    assert space.label(defaults["chain"]) == "3/1/4 confidence 0"


def test_methods_of_params_are_measured_as_they_are_evaluated() -> None:
    """In the evaluation's dtype, not in the first that the sweep may choose."""
    wanted = settings("space", "draft_dtypes", value=["bfloat16", "int8"])
    space = make_space(wanted)
    assert default_configurations(wanted, space)["eagle3 of params.yaml"].draft_dtype == "int8"
    elsewhere = settings("space", value={**settings_space(), "draft_dtypes": ["bfloat16"], "threads": [1, 2]})
    found = default_configurations(elsewhere, make_space(elsewhere))["eagle3 of params.yaml"]
    assert (found.draft_dtype, found.threads) == ("int8", 0)
    assert make_space(elsewhere).label(found) == "2/3/6 int8 0 threads"
    assert "eagle3 of params.yaml" not in [name for name, _ in first_trials(elsewhere, make_space(elsewhere))]


def settings_space() -> dict[str, Any]:
    """`sweep.space` of the default profile."""
    values: dict[str, Any] = read_profile("default", PROFILES)["sweep"]["space"]
    return values


def served(engine: str = "sglang", **own: Any) -> dict[str, Any]:
    """The identity of a served sweep, with changes of the engine's settings."""
    values = copy.deepcopy(read_profile("default", PROFILES))
    values["sweep"]["engine"] = engine
    values["serving"]["sglang"] |= own
    return served_identity(parse_settings(values))


def test_served_sweeps_are_bound_to_how_their_servers_run() -> None:
    first = served(options={"mem-fraction-static": 0.8}, environment={"TOKEN": "secret"})
    other = served(
        options={"mem-fraction-static": 0.7},
        environment={"TOKEN": "changed"},
        urls={"vanilla": "http://host:30000"},
    )
    assert changed_keys(first, other) == [
        "serving.environment.TOKEN",
        "serving.options.mem-fraction-static",
        "serving.urls.vanilla",
    ]
    assert "secret" not in str(first)
    assert first["serving"]["code"]
    assert served("native") == {}


def test_default_grid_is_tried_in_an_order_of_its_own() -> None:
    wanted = settings()
    space = make_space(wanted)
    points = [point for _, point in grid_trials(wanted, space)]
    assert len(points) == len(set(points)) > 50
    assert points != sorted(points, key=lambda point: (point.num_steps, point.topk))
    nothing = settings("grid", value={"num_steps": [1], "topk": [2], "num_draft_tokens": [64]})
    with pytest.raises(ValueError, match=r"sweep\.grid"):
        grid_trials(nothing, space)


def test_prompts_are_the_first_of_their_split(tmp_path: Path) -> None:
    rows = [
        {"id": f"{split}-{index}", "split": split, "turns": ["Why?"]}
        for index in range(3)
        for split in ("tuning", "held_out")
    ]
    write_jsonl(tmp_path / "quiz.jsonl", rows)
    assert [prompt.id for prompt in task_prompts(tmp_path, ["quiz"], "tuning", 2)] == ["tuning-0", "tuning-1"]
    with pytest.raises(ValueError, match="no prompt of the other split"):
        task_prompts(tmp_path, ["quiz"], "other", 2)


@pytest.mark.parametrize(("threads", "own"), [([0], False), ([2], True)])
def test_a_single_number_of_threads_is_used_as_well(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], own: bool
) -> None:
    wanted = settings("space", "threads", value=threads)
    target = SimpleNamespace(dtype=torch.float32)
    bench = SimpleNamespace(target=target, tuned=lambda configuration, name, batch: FakeDecoder(name))
    monkeypatch.setattr(setup, "evaluated_target", lambda *arguments: target)
    monkeypatch.setattr(setup, "Bench", lambda *arguments: bench)
    with ExitStack() as stack:
        workbench = setup.load_workbench(wanted, "cpu", stack)
    decoder = workbench.decoder(make_space(wanted).default((3, 1, 4)))
    assert isinstance(decoder, WithThreads) == own


def test_threads_are_set_for_each_decoder() -> None:
    before = torch.get_num_threads()
    try:
        seen: list[int] = []

        def look(prompt_ids: Sequence[int]) -> bool:
            seen.append(torch.get_num_threads())
            return False

        for threads in (2, 1):
            decoder = FakeDecoder("trial", fail=look)
            WithThreads(decoder, threads).generate([1, 2], 3, Sampling())
        assert seen == [2, 1]
    finally:
        torch.set_num_threads(before)
