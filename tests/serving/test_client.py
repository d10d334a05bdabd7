"""Streams, counters and agreement, over a real HTTP server with both engines' protocols."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.independent_drafter import IndependentDrafter
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.tree import TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.measure.acceptance import mean_acceptance_length
from eagle3.models.target import Target
from eagle3.serving.agreement import agree, state_difference
from eagle3.serving.bench import ServedDecoder
from eagle3.serving.client import Client, Streamed
from eagle3.serving.engines import Engine, Speculation
from eagle3.serving.load import answer_all
from eagle3.serving.metrics import reconcile, reconcile_average, rounds_of, summarise
from eagle3.serving.server import ServerError
from tests.data.served import Server, serving
from tests.decoding.drafts import random_draft

PROMPTS = [("a", [5, 17, 60, 3, 99]), ("b", [7, 7, 12]), ("c", [1, 2, 3, 4, 5, 6])]
STEPS = 3
PROTOCOL: dict[Engine, str] = {"sglang": "sglang", "vllm": "openai"}


@pytest.fixture(params=["sglang", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    value: Engine = request.param
    return value


@pytest.fixture
def speculative(tiny_target: Target) -> SpeculativeDecoder:
    """Its own model drafts for it, so that rounds of several tokens are sure."""
    return SpeculativeDecoder(tiny_target, IndependentDrafter(tiny_target, tiny_target, STEPS), "eagle3")


@pytest.fixture
def server(tiny_target: Target, engine: Engine, speculative: SpeculativeDecoder) -> Iterator[Server]:
    with serving(tiny_target, PROTOCOL[engine], speculative) as running:
        yield running


def test_a_stream_gives_the_tokens_and_one_piece_a_round(
    server: Server, engine: Engine, speculative: SpeculativeDecoder
) -> None:
    client = Client(engine, server.url)
    for _, ids in PROMPTS:
        mine, answer = speculative.generate(ids, 20, Sampling()), client.stream(ids, 20, Sampling())
        assert answer.token_ids == mine.token_ids
        assert answer.produced == mine.acceptance_lengths
        assert answer.finish_reason == mine.finish_reason
        assert list(answer.arrivals) == sorted(answer.arrivals)
    assert client.version() == f"0.0.{engine}"


def test_acceptance_is_this_projects_own(
    server: Server, engine: Engine, speculative: SpeculativeDecoder
) -> None:
    """tau leaves the prefill's token out; SGLang's own average counts it."""
    ids = [item for _, item in PROMPTS]
    answers, seconds = answer_all(engine, server.url, ids, 20, 2)
    native = [speculative.generate(item, 20, Sampling()) for item in ids]
    row = summarise(answers, [len(item) for item in ids], seconds, STEPS)
    produced = [length for generation in native for length in generation.acceptance_lengths]
    assert row["tau"] == pytest.approx(sum(produced) / len(produced))
    assert row["tokens"] == sum(len(generation.token_ids) for generation in native)
    rounds = [rounds_of(answer, len(item), STEPS) for answer, item in zip(answers, ids, strict=True)]
    assert mean_acceptance_length(rounds) == row["tau"]
    if engine == "sglang":  # its histogram has the drafts that the end of the answer cut off, too
        assert sorted(n for item in rounds for n in item.accepted) == sorted(
            n for generation in native for n in generation.accepted_drafts
        )


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
@pytest.mark.parametrize("merge", [2, 3, 100])
def test_acceptance_is_the_same_where_pieces_come_together(
    server: Server, engine: Engine, speculative: SpeculativeDecoder, merge: int
) -> None:
    """A loaded server merges outputs: its count of verifications is what holds."""
    served = ServedDecoder("x", Client(engine, server.url), Speculation("eagle3", Path("d"), STEPS, 2, 6))
    server.merge = merge
    for _, ids in PROMPTS:
        mine, theirs = (item.generate(ids, 19, Sampling()) for item in (speculative, served))
        answer = Client(engine, server.url).stream(ids, 19, Sampling())
        assert len(answer.produced) < len(mine.rounds) == answer.meta["spec_verify_ct"]
        assert len(theirs.rounds) == len(mine.rounds)
        assert sum(theirs.acceptance_lengths) == len(mine.token_ids) - 1
        assert sorted(theirs.accepted_drafts) == sorted(mine.accepted_drafts)
        assert min(theirs.acceptance_lengths) >= 1
        row = summarise([answer], [len(ids)], 1.0, STEPS)
        assert row["tau"] == pytest.approx((len(mine.token_ids) - 1) / len(mine.rounds))


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("merge", [1, 2, 100])
def test_rounds_are_told_in_order_where_the_server_does(
    server: Server, engine: Engine, speculative: SpeculativeDecoder, merge: int
) -> None:
    server.merge = merge
    client, before = Client(engine, server.url), Client(engine, server.url).prometheus()
    answers = [client.stream(ids, 19, Sampling()) for _, ids in PROMPTS]
    for (_, ids), answer in zip(PROMPTS, answers, strict=True):
        mine = speculative.generate(ids, 19, Sampling())
        rounds = rounds_of(answer, len(ids), STEPS)
        assert rounds.produced == mine.acceptance_lengths
        assert rounds.accepted == mine.accepted_drafts
    assert agree(speculative, PROMPTS, answers, 19).acceptance_equal
    counters = reconcile(engine, answers, before, client.prometheus(), speculative=True)
    assert counters["agree"]
    assert counters["accepted drafts"]["requests"] > 0
    # Of a server that was not started for it, the pieces are all there is.
    server.tells_rounds = False
    pieces = client.stream(PROMPTS[0][1], 19, Sampling())
    assert rounds_of(pieces, 5, STEPS).produced == pieces.produced


def test_rounds_of_a_histogram_that_does_not_add_up_are_spread_evenly() -> None:
    meta = {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [0, 1]}
    rounds = rounds_of(Streamed(tuple(range(9)), "length", (1, 8), (0.1, 0.2), meta), 4, STEPS)
    assert rounds.produced == (3, 3, 2)
    assert rounds.accepted == (2, 2, 1)


def test_the_servers_average_is_held_against_the_requests(
    server: Server, engine: Engine, speculative: SpeculativeDecoder
) -> None:
    answers, _ = answer_all(engine, server.url, [item for _, item in PROMPTS], 20, 1)
    rounds = [r for _, ids in PROMPTS for r in speculative.generate(ids, 20, Sampling()).rounds]
    average = 1 + sum(r.accepted for r in rounds) / len(rounds)
    same = reconcile_average(answers, average)
    assert same is not None
    assert same["agree"]
    assert same["difference"] == pytest.approx(0.0)
    other = reconcile_average(answers, average + 0.5)
    assert other is not None
    assert not other["agree"]
    assert reconcile_average(answers, None) is None


def test_the_servers_counters_are_reconciled(server: Server, engine: Engine) -> None:
    client = Client(engine, server.url)
    before = client.prometheus()
    answers, _ = answer_all(engine, server.url, [item for _, item in PROMPTS], 12, 3)
    after = client.prometheus()
    result = reconcile(engine, answers, before, after, speculative=True)
    assert result["agree"]
    assert result["verifications"]["server"] == sum(len(answer.produced) for answer in answers)
    name = next(key for key in after if key.endswith("generation_tokens_total"))
    assert not reconcile(engine, answers, before, {**after, name: after[name] + 1}, speculative=True)["agree"]
    assert "verifications" not in reconcile(engine, answers, before, after, speculative=False)
    assert after["vllm:spec_decode_num_accepted_tokens_per_pos_total[1]"] == 3.0


def test_answers_keep_their_order_at_every_concurrency(server: Server, engine: Engine) -> None:
    ids = [item for _, item in PROMPTS] * 3
    one, _ = answer_all(engine, server.url, ids, 6, 1)
    four, _ = answer_all(engine, server.url, ids, 6, 4)
    assert [answer.token_ids for answer in one] == [answer.token_ids for answer in four]
    assert server.most > 1


def test_the_gate_passes_the_same_draft_and_stops_another(
    server: Server, engine: Engine, tiny_target: Target, speculative: SpeculativeDecoder
) -> None:
    answers, _ = answer_all(engine, server.url, [item for _, item in PROMPTS], 24, 1)
    same = agree(speculative, PROMPTS, answers, 24)
    assert (same.compared, same.tokens_equal, same.acceptance_equal) == (3, True, True)
    assert agree(VanillaDecoder(tiny_target), PROMPTS, answers, 24).tokens_equal
    other = SpeculativeDecoder(
        tiny_target, EagleDrafter(random_draft(tiny_target), TreeShape(3, 2, 6)), "other"
    )
    different = agree(other, PROMPTS, answers, 24)
    assert different.tokens_equal
    assert not different.acceptance_equal
    assert "the rounds add" in different.differences[0]
    wrong = [*answers[:2], Streamed((*answers[2].token_ids[:3], 0), "length", (1, 3), (0.1, 0.2), {})]
    tokens = agree(speculative, PROMPTS, wrong, 24)
    assert (tokens.tokens_equal, tokens.acceptance_equal) == (False, False)
    assert tokens.differences[0].startswith("c: tokens differ from new token 3")


def test_a_served_decoder_is_a_decoder(
    server: Server, engine: Engine, speculative: SpeculativeDecoder
) -> None:
    served = ServedDecoder("x", Client(engine, server.url), Speculation("eagle3", Path("d"), 3, 2, 6))
    mine, theirs = (item.generate(PROMPTS[0][1], 16, Sampling()) for item in (speculative, served))
    assert theirs.token_ids == mine.token_ids
    assert theirs.acceptance_lengths == mine.acceptance_lengths
    assert theirs.prefill_seconds > 0
    assert theirs.decode_seconds > 0
    assert (theirs.rounds[0].nodes, theirs.rounds[0].depth) == (6, 3)


def test_a_server_that_fails_is_an_error_with_its_answer(server: Server, engine: Engine) -> None:
    client = Client(engine, server.url)
    server.fail = 1
    with pytest.raises(ServerError, match="status 503"):
        client.stream([1, 2], 4, Sampling())
    server.hang_up = 1
    with pytest.raises(ServerError, match=r"does not answer|broke an answer off"):
        client.stream([1, 2], 4, Sampling())
    with pytest.raises(ServerError, match="does not answer"):
        Client("vllm", "http://127.0.0.1:9")


def test_states_of_a_neighbouring_layer_differ_by_far_more_than_arithmetic(tiny_target: Target) -> None:
    ids = [5, 17, 60, 3]

    def states(layers: tuple[int, ...]) -> torch.Tensor:
        target = Target(tiny_target.model, tiny_target.tokenizer, layers, compiled=False)
        with torch.inference_mode():
            positions = torch.arange(len(ids))[None]
            return target.forward(torch.tensor([ids]), positions, target.new_cache(8)).captured[0]

    own = tiny_target.capture_layers
    assert state_difference(tiny_target, ids, states(own)) < 1e-4
    shifted = tuple(layer + 1 for layer in own)
    assert state_difference(tiny_target, ids, states(shifted)) > 1e-2
    with pytest.raises(ValueError, match="another number of layers"):
        state_difference(tiny_target, ids, states(own[:2]))
