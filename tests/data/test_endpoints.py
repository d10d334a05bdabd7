"""Regeneration through servers: the rows are the target's, whatever the servers do in between."""

from __future__ import annotations

import copy
import json
import runpy
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import parse_settings
from eagle3.data import chat, endpoints, regenerate
from eagle3.data.endpoint import EndpointError, RowRefused
from eagle3.data.endpoints import Endpoints, Refused, answer_from_endpoints
from eagle3.data.generate import Answered, Request, answer
from eagle3.data.prompt import Prompt
from eagle3.data.rows import read_rows
from eagle3.decoding.sampling import Sampling
from eagle3.models.target import Target
from eagle3.parameters import SettingsError, merge, read_profile
from tests.data.served import Server, serving
from tests.data.test_regenerate import PROMPTS, Workspace

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "profiles"
GREEDY = Sampling()
REQUESTS = [
    Request(
        f"id-{index}", tuple(((5 + index) * (turn + 1) % 300, 17, 60 + turn) for turn in range(1 + index % 3))
    )
    for index in range(10)
]


def test_servers_that_answer_have_the_gpu_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the target does not fit a card of its size."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device_of = runpy.run_path(str(ROOT / "experiments" / "regenerate.py"), run_name="regenerate")[
        "device_of"
    ]
    for urls, device in (([], "cuda"), (["http://127.0.0.1:9"], "cpu")):
        changes = {"regenerate": {"endpoints": urls, "capture_hidden_states": not urls}}
        online = {"train": {"hidden_states": "online"}}
        settings = parse_settings(merge(merge(read_profile("default", PROFILES), changes), online))
        assert device_of(settings) == device


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    """A target of which a part of the answers end by themselves."""
    other = copy.copy(tiny_target)
    other.eos_token_ids = frozenset({2, *range(200, 260)})
    return other


@pytest.fixture(params=["sglang", "openai"])
def server(target: Target, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(target, request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(endpoints, "_LONGEST_PAUSE", 0.05)


def served(
    target: Target, *urls: str, sampling: Sampling = GREEDY, concurrency: int = 3
) -> dict[str, Answered]:
    answers = answer_from_endpoints(
        urls, REQUESTS, sampling, concurrency, 8, 60, target.eos_token_ids, say=lambda _: None
    )
    found = {answered.id: answered for answered in answers if isinstance(answered, Answered)}
    assert len(found) == len(REQUESTS)
    return found


def local(target: Target) -> dict[str, Answered]:
    answers = answer(target, REQUESTS, GREEDY, 4, 8, 60, capture=False)
    return {answered.id: answered for answered in answers}


def test_greedy_answers_are_those_of_this_machine(target: Target, server: Server) -> None:
    expected = local(target)
    assert {answered.finish_reason for answered in expected.values()} == {"stop", "length"}
    assert any(len(answered.answer_spans) > 1 for answered in expected.values())
    assert served(target, server.url) == expected


def test_rows_are_seeded_by_their_ids(target: Target, server: Server) -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    first, again = (served(target, server.url, sampling=sampling, concurrency=size) for size in (1, 4))
    assert first == again, "neither order nor concurrency changes a row"
    assert first != served(target, server.url, sampling=Sampling(temperature=1.0, seed=4))


def test_requests_in_flight_are_bounded(target: Target, server: Server) -> None:
    served(target, server.url, concurrency=2)
    assert 1 <= server.most <= 2


def test_failures_cost_time_only(target: Target, server: Server) -> None:
    server.fail, server.hang_up = 4, 3
    assert served(target, server.url) == local(target)


def test_a_dead_endpoint_leaves_its_work_to_the_others(target: Target, server: Server) -> None:
    with serving(target, "sglang") as other:
        dead = other.url
    assert served(target, dead, server.url + "/") == local(target)


def test_an_endpoint_that_dies_on_the_way(target: Target, server: Server) -> None:
    with serving(target, "openai") as other:
        other.hang_up = 10**6
        assert served(target, other.url, server.url) == local(target)


def test_when_no_endpoint_answers_the_run_ends(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_GIVE_UP", 0.2)
    with serving(target, "sglang") as gone:
        url = gone.url
    with pytest.raises(ValueError, match=f"no endpoint has answered .*{url}.*goes on when one is back"):
        served(target, url)


def test_text_without_token_ids_is_refused(target: Target) -> None:
    with serving(target, "openai") as server:
        server.token_ids = False
        with pytest.raises(ValueError, match="returns no token ids"):
            served(target, server.url)


def test_an_answer_that_the_server_ended_is_asked_again(target: Target, server: Server) -> None:
    server.abort = 3
    assert served(target, server.url) == local(target)


def test_a_prompt_whose_answers_are_always_ended_is_refused(target: Target, server: Server) -> None:
    server.abort = 10**6
    with pytest.raises(RowRefused, match=r"ended 5 times: .* ended with abort"):
        Endpoints([server.url], say=lambda _: None).complete([1, 2], 4, GREEDY)


def test_a_server_that_lists_no_model_yet_is_asked_again(target: Target) -> None:
    with serving(target, "openai") as server:
        server.starting = 2
        assert served(target, server.url) == local(target)


@pytest.mark.parametrize(
    ("status", "message"), [(401, "asks for a key"), (403, "does not let"), (404, "without a path")]
)
def test_a_status_that_is_about_the_endpoint_ends_the_run(
    target: Target, server: Server, status: int, message: str
) -> None:
    server.refused, server.refusal = 17, status
    with pytest.raises(ValueError, match=f"{server.url}: status {status}: .*{message}"):
        served(target, server.url)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_prompt_is_set_aside_and_the_rest_goes_on(
    target: Target, server: Server, status: int
) -> None:
    bad = Request("bad", ((299, 1, 2),))
    server.refused, server.refusal = 299, status
    found = list(
        answer_from_endpoints([server.url], [bad, *REQUESTS], GREEDY, 1, 8, 60, target.eos_token_ids)
    )
    refused = [item for item in found if isinstance(item, Refused)]
    assert [item.id for item in refused] == ["bad"]
    assert f"status {status}" in refused[0].reason
    assert {item.id for item in found} == {"bad", *(request.id for request in REQUESTS)}


def test_another_endpoint_may_take_what_one_refuses(target: Target, server: Server) -> None:
    with serving(target, "sglang") as other:
        other.refused = 17
        assert served(target, other.url, server.url) == local(target)


def test_what_the_only_living_endpoint_refuses_is_set_aside(
    target: Target, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_GIVE_UP", 0.5)
    with serving(target, "sglang") as other:
        dead = other.url
    server.refused = REQUESTS[-1].segments[0][0]
    refused = [request.id for request in REQUESTS if server.refused in request.segments[0]]
    assert 0 < len(refused) < len(REQUESTS)
    answers = answer_from_endpoints(
        [dead, server.url], REQUESTS, GREEDY, 3, 8, 60, target.eos_token_ids, say=lambda _: None
    )
    assert {item.id for item in answers if isinstance(item, endpoints.Refused)} >= set(refused)


def test_an_endpoint_given_twice_is_one(target: Target, server: Server) -> None:
    server.refused = REQUESTS[-1].segments[0][0]
    answers = answer_from_endpoints(
        [server.url, server.url + "/"], REQUESTS, GREEDY, 3, 8, 60, target.eos_token_ids, say=lambda _: None
    )
    assert any(isinstance(item, endpoints.Refused) for item in answers)


def test_where_every_prompt_is_refused_it_is_not_the_prompts(target: Target, server: Server) -> None:
    server.refused = 17  # in every one
    with pytest.raises(ValueError, match=r"the first 8 prompts were refused, and none answered; .*not taken"):
        served(target, server.url)


def test_requests_that_fail_together_are_one_failure_and_pauses_have_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "_FIRST_PAUSE", 30.0)
    monkeypatch.setattr(endpoints, "_LONGEST_PAUSE", 60.0)
    said: list[str] = []
    several = Endpoints(["http://127.0.0.1:9"], say=said.append)
    endpoint, _ = several._next(())
    assert endpoint is not None
    for _ in range(32):
        several._failed(endpoint, EndpointError("gone"))
    assert said == ["gone; left alone for 30 s"]
    endpoint.failures, endpoint.rests_until = 5000, 0.0
    several._failed(endpoint, EndpointError("gone"))
    assert said[-1] == "gone; left alone for 60 s"


def test_another_models_name_is_said(target: Target, server: Server, tmp_path: Path) -> None:
    """Once: paths differ between machines, so that it decides nothing."""
    said: list[str] = []
    for name in ("Tiny", "other"):
        folder = tmp_path / name
        several = Endpoints([server.url], folder, said.append)
        for _ in range(2):
            several.complete([1, 2], 4, GREEDY)
    assert len(said) == 1
    assert f"serves tiny: check that this is the target in {tmp_path / 'other'}" in said[0]
    (folder / "target.json").parent.mkdir()
    (folder / "target.json").write_text(json.dumps({"source": "hf:maker/tiny"}))
    Endpoints([server.url], folder, said.append).complete([1, 2], 4, GREEDY)
    assert len(said) == 1


def test_an_interrupt_ends_the_requests_under_way(target: Target, server: Server) -> None:
    server.unheld = 1
    of_one_turn = REQUESTS[::3]
    answers = answer_from_endpoints([server.url], of_one_turn, GREEDY, 3, 8, 60, target.eos_token_ids)
    assert isinstance(answers, Generator)
    next(answers)
    while server.running < 2:
        time.sleep(0.01)
    answers.close()
    assert server.running == 2, "closing waits for no answer: the server still holds two back"
    server.held.set()


def test_an_interrupt_while_a_shard_is_written_ends_them_too(
    target: Target, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(regenerate, "_write_group", interrupted)
    server.unheld = 1
    with pytest.raises(KeyboardInterrupt) as kept:
        Workspace(tmp_path, target).run(
            {"capture_hidden_states": False, "group_size": 1, "endpoints": (server.url,), "concurrency": 3},
            PROMPTS[::3],  # of one turn
        )
    assert kept.tb is not None, "which holds whatever was not closed"
    assert not [each for each in threading.enumerate() if each.name.startswith("ThreadPoolExecutor")]
    server.held.set()


def test_a_refused_row_is_in_quarantine_with_its_reason_and_counted(
    target: Target, server: Server, tmp_path: Path
) -> None:
    """And the same command again asks nothing."""
    workspace = Workspace(tmp_path, target)
    changes: dict[str, Any] = {"temperature": 0.0, "capture_hidden_states": False, "concurrency": 2}
    prompts = [*PROMPTS[:6], (Prompt("bad", "source-0", ("@@@",), None), "train"), *PROMPTS[6:]]
    rendered = {
        prompt.id: set(chat.render_prompt(target.tokenizer, chat.conversation(prompt.turns)))
        for prompt, _ in prompts
    }
    others = set().union(*(ids for name, ids in rendered.items() if name != "bad"))
    server.refused = min(rendered["bad"] - others)
    manifest = workspace.run({**changes, "endpoints": (server.url,)}, prompts)
    assert manifest["left_out"] == {"refused by the endpoints": 1}
    assert [row.id for row in read_rows(workspace.rows)] == [prompt.id for prompt, _ in PROMPTS]
    quarantined = json.loads((workspace.rows / "quarantine-00001.jsonl").read_text())
    assert quarantined["id"] == "bad"
    assert "this prompt is not taken" in quarantined["reason"]
    asked = len(server.seen)
    assert workspace.run({**changes, "endpoints": ("http://127.0.0.1:9",)}, prompts) == manifest
    assert len(server.seen) == asked


def test_regenerated_rows_are_the_same_files(target: Target, server: Server, tmp_path: Path) -> None:
    """And another server, or another number of requests at once, goes on with the same shards."""
    here, there = Workspace(tmp_path / "here", target), Workspace(tmp_path / "there", target)
    changes: dict[str, Any] = {"temperature": 0.0, "capture_hidden_states": False}
    here.run(changes)
    there.run({**changes, "endpoints": (server.url,)})
    assert read_rows(there.rows) == read_rows(here.rows)
    assert len(read_rows(there.rows)) == len(PROMPTS)
    asked = len(server.seen)
    there.run({**changes, "endpoints": ("http://127.0.0.1:9",), "concurrency": 1})
    assert len(server.seen) == asked, "everything was there"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoints": ["127.0.0.1:30000"]}, r"regenerate\.endpoints\.0"),
        ({"endpoints": ["http://127.0.0.1:30000"]}, "capture_hidden_states to false"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    values = merge(read_profile("default", PROFILES), {"regenerate": changes})
    with pytest.raises(SettingsError, match=message):
        parse_settings(values)
