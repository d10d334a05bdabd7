"""Regeneration through servers: the rows are the target's, whatever the servers do in between."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import parse_settings
from eagle3.data import endpoints
from eagle3.data.endpoints import answer_from_endpoints
from eagle3.data.generate import Answered, Request, answer
from eagle3.data.rows import read_rows
from eagle3.decoding.sampling import Sampling
from eagle3.models.target import Target
from eagle3.parameters import SettingsError, merge, read_profile
from tests.data.served import Server, serving
from tests.data.test_regenerate import PROMPTS, Workspace

PROFILES = Path(__file__).parents[2] / "profiles"
GREEDY = Sampling()
REQUESTS = [
    Request(
        f"id-{index}", tuple(((5 + index) * (turn + 1) % 300, 17, 60 + turn) for turn in range(1 + index % 3))
    )
    for index in range(10)
]


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
    found = {answered.id: answered for answered in answers}
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
