"""Regeneration: every prompt answered once, whatever kills it, and rows that are what the target said."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import RegenerateSettings, parse_settings
from eagle3.data import chat
from eagle3.data import regenerate as module
from eagle3.data.prompt import Prompt
from eagle3.data.regenerate import regenerate
from eagle3.data.rows import HiddenStates, Row, read_rows
from eagle3.models.target import Target
from eagle3.parameters import read_profile
from eagle3.provenance import hash_tree

PROFILES = Path(__file__).parents[2] / "profiles"
DEFAULT = parse_settings(read_profile("default", PROFILES)).regenerate
WORDS = ["the", "quick", "brown", "fox", "jumps", "the", "lazy", "dog", "asks", "a", "question"]
PROMPTS = [
    (
        Prompt(
            f"id-{index}",
            f"source-{index % 2}",
            tuple(" ".join(WORDS[index % 7 : index % 7 + 2 + turn]) for turn in range(1 + index % 3)),
            "be brief" if index % 4 == 0 else None,
        ),
        "validation" if index % 5 == 0 else "train",
    )
    for index in range(20)
]
IDENTITY = {"target": "t", "code": "c"}


def settings(**changes: Any) -> RegenerateSettings:
    small = {
        "max_new_tokens": 8,
        "max_length": 120,
        "temperature": 1.0,
        "batch_size": 3,
        "dtype": "float32",
        "group_size": 4,
    }
    return DEFAULT.model_copy(update={**small, **changes})


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    """A target of which a part of the answers end by themselves."""
    other = copy.copy(tiny_target)
    other.eos_token_ids = frozenset({2, *range(200, 260)})
    return other


class Killed(BaseException):
    """A kill: nothing catches it."""


class Workspace:
    """Two folders and what regenerates into them."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.rows, self.hidden, self._target = folder / "rows", folder / "hidden", target

    def run(
        self,
        changes: dict[str, Any] | None = None,
        prompts: list[tuple[Prompt, str]] | None = None,
        seed: int = 0,
        identity: dict[str, Any] = IDENTITY,
    ) -> dict[str, Any]:
        chosen = PROMPTS if prompts is None else prompts
        return regenerate(
            self._target, chosen, settings(**changes or {}), seed, self.rows, self.hidden, identity
        )

    def hashes(self) -> tuple[str, str]:
        return hash_tree(self.rows), hash_tree(self.hidden)

    def written(self) -> list[Row]:
        return read_rows(self.rows)


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A regeneration that nothing interrupted."""
    workspace = Workspace(tmp_path_factory.mktemp("whole"), target)
    workspace.run()
    return workspace


@pytest.fixture
def workspace(target: Target, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path, target)


# --- rows ---


def test_every_prompt_has_its_row_in_the_order_of_the_prompts(whole: Workspace) -> None:
    rows = whole.written()
    assert [(row.id, row.source, row.split) for row in rows] == [
        (prompt.id, prompt.source, split) for prompt, split in PROMPTS
    ]
    assert sorted(path.name for path in whole.rows.glob("shard-*")) == [
        f"shard-0000{index}.jsonl" for index in range(5)
    ]


def test_rows_are_the_chat_template_around_what_was_sampled(target: Target, whole: Workspace) -> None:
    """ids = prompt + answer + next turn + answer ...; the spans are the answers with their EOS."""
    several = 0
    for row, (prompt, _) in zip(whole.written(), PROMPTS, strict=True):
        first = chat.render_prompt(
            target.tokenizer, chat.conversation(prompt.turns[:1], system=prompt.system)
        )
        expected = list(first)
        for number, (start, end) in enumerate(row.answer_spans):
            if number:
                turns = prompt.turns[: number + 1]
                expected += chat.next_turn_ids(target.tokenizer, turns, prompt.system, target.eos_token_ids)
                several += 1
            assert start == len(expected)
            expected += row.token_ids[start:end]
        assert list(row.token_ids) == expected
        assert len(row.answers) == len(row.answer_spans)
        for text, (start, end) in zip(row.answers, row.answer_spans, strict=True):
            assert text == target.tokenizer.decode(row.token_ids[start:end], skip_special_tokens=True)
    assert several > 3


def test_finish_reasons_are_stored_as_they_were(target: Target, whole: Workspace) -> None:
    """A cut-off answer that counts as complete teaches the draft to stop in the middle of a sentence."""
    reasons = set()
    for row in whole.written():
        start, end = row.answer_spans[-1]
        ended = row.token_ids[-1] in target.eos_token_ids
        assert row.finish_reason == ("stop" if ended else "length")
        assert ended or end - start == 8
        reasons.add(row.finish_reason)
    assert reasons == {"stop", "length"}


def test_states_and_choices_belong_to_their_rows(target: Target, whole: Workspace) -> None:
    states = HiddenStates(whole.hidden)
    for row in whole.written():
        length = len(row.token_ids) - 1
        output = target.forward(
            torch.tensor([row.token_ids[:-1]]), torch.arange(length)[None], target.new_cache(length)
        )
        expected = torch.cat((output.captured, output.final), dim=-1)[0].to(torch.bfloat16)
        assert torch.equal(states[row.id], expected)
        assert output.logits is not None
        assert list(row.target_argmax) == output.logits[0].argmax(-1).tolist()


def test_manifest_counts_what_is_there(whole: Workspace) -> None:
    manifest = json.loads((whole.rows / "manifest.json").read_text())
    rows = whole.written()
    assert manifest["rows"] == 20 == manifest["train"] + manifest["validation"]
    assert manifest["validation"] == 4
    assert manifest["tokens"] == sum(len(row.token_ids) for row in rows)
    assert manifest["answer_tokens"] == sum(int(row.answer_mask().sum()) for row in rows)
    assert manifest["finish_reason"] == {
        reason: sum(row.finish_reason == reason for row in rows) for reason in ("length", "stop")
    }
    assert manifest["left_out"] == {}
    assert manifest["identity"].items() > IDENTITY.items()


def test_without_capture_the_rows_are_the_same_and_nothing_else_is_written(
    whole: Workspace, workspace: Workspace
) -> None:
    workspace.run({"capture_hidden_states": False})
    assert not list(workspace.hidden.iterdir())
    for bare, row in zip(workspace.written(), whole.written(), strict=True):
        assert bare.token_ids == row.token_ids
        assert bare.target_argmax == ()


# --- the batch does not matter ---


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 20}, {"group_size": 7}], ids=str)
def test_batch_and_shard_sizes_change_no_row(
    whole: Workspace, workspace: Workspace, changes: dict[str, Any]
) -> None:
    manifest = workspace.run(changes)
    assert workspace.written() == whole.written()
    states, expected = HiddenStates(workspace.hidden), HiddenStates(whole.hidden)
    assert all(torch.equal(states[row.id], expected[row.id]) for row in whole.written())
    assert manifest["data_hash"] == json.loads((whole.rows / "manifest.json").read_text())["data_hash"]


def test_the_order_of_the_prompts_changes_no_row(whole: Workspace, workspace: Workspace) -> None:
    workspace.run(prompts=PROMPTS[::-1])
    assert workspace.written() == whole.written()[::-1]


# --- kills ---


def killing_target(target: Target, after: int) -> Target:
    """A target that is killed in its forward number `after`."""
    other = copy.copy(target)
    calls = iter(range(after))

    def forward(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return target.forward(*arguments, **options)

    other.forward = forward  # type: ignore[method-assign]
    return other


@pytest.mark.parametrize("kills", [[0], [1], [25], [45], [65], [30, 20, 10]], ids=str)
def test_killed_and_resumed_gives_the_same_bytes(
    target: Target, whole: Workspace, tmp_path: Path, kills: list[int]
) -> None:
    """No row lost or doubled, rows and hidden states alike, wherever the kill fell."""
    for after in kills:
        with pytest.raises(Killed):
            Workspace(tmp_path, killing_target(target, after)).run()
        with pytest.raises(ValueError, match="no finished regeneration"):
            read_rows(tmp_path / "rows")
    resumed = Workspace(tmp_path, target)
    manifest = resumed.run()
    assert resumed.hashes() == whole.hashes()
    assert manifest["rows"] == 20


def test_some_kills_leave_finished_shards_and_those_are_not_answered_again(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the resumption is for."""
    with pytest.raises(Killed):
        Workspace(tmp_path, killing_target(target, 65)).run()
    finished = len(list((tmp_path / "rows").glob("shard-*.jsonl")))
    assert 0 < finished < 5
    answered: list[str] = []
    resumed = Workspace(tmp_path, target)
    original: Callable[..., Any] = module.answer

    def watched(own: Target, requests: Any, *rest: Any) -> Any:
        chosen = list(requests)
        answered.extend(request.id for request in chosen)
        return original(own, chosen, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "answer", watched)
        resumed.run()
    assert len(answered) == 4 * (5 - finished)
    assert f"resuming: {finished} of 5 shards are there already" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["write_hidden_states", "write_rows"])
def test_a_kill_between_states_and_rows_gives_the_same_bytes(
    whole: Workspace, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = getattr(module, name)

    def killed(folder: Path, index: int, *rest: Any) -> None:
        if index == 2:
            raise Killed
        original(folder, index, *rest)

    monkeypatch.setattr(module, name, killed)
    with pytest.raises(Killed):
        workspace.run()
    monkeypatch.undo()
    workspace.run()
    assert workspace.hashes() == whole.hashes()


def test_a_finished_regeneration_is_not_done_again(target: Target, whole: Workspace, tmp_path: Path) -> None:
    first = Workspace(tmp_path, target)
    manifest = first.run()
    assert Workspace(tmp_path, killing_target(target, 0)).run() == manifest
    assert first.hashes() == whole.hashes()


@pytest.mark.parametrize(
    "changes", [{"batch_size": 20}, {"group_size": 7}, {"batch_size": 1, "group_size": 1}], ids=str
)
def test_another_batch_or_shard_size_asks_nothing_again(
    target: Target, whole: Workspace, tmp_path: Path, changes: dict[str, Any]
) -> None:
    Workspace(tmp_path, target).run(changes)
    resumed = Workspace(tmp_path, killing_target(target, 0))
    resumed.run()
    assert resumed.hashes() == whole.hashes()


def test_a_killed_run_goes_on_with_other_sizes(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        Workspace(tmp_path / "killed", killing_target(target, 65)).run()
    finished = len(list((tmp_path / "killed" / "rows").glob("shard-*.jsonl")))
    assert 0 < finished < 5
    changes = {"batch_size": 5, "group_size": 3}
    resumed, fresh = Workspace(tmp_path / "killed", target), Workspace(tmp_path / "fresh", target)
    capsys.readouterr()
    resumed.run(changes)
    assert f"{4 * finished} of 20 are the same and keep their answers" in capsys.readouterr().out
    fresh.run(changes)
    assert resumed.hashes() == fresh.hashes()


def test_what_a_kill_left_half_written_is_removed(whole: Workspace, workspace: Workspace) -> None:
    workspace.run(prompts=PROMPTS[:8])
    for name in ("manifest.json", "resume.json", "shard-00002.jsonl", "quarantine-00000.jsonl"):
        (workspace.rows / f".4711.{name}").write_text("{")
    (workspace.hidden / ".4711.shard-00002.safetensors").write_text("{")
    workspace.run()
    assert workspace.hashes() == whole.hashes()


CHANGES: dict[str, dict[str, Any]] = {
    "settings": {"changes": {"temperature": 0.5}},
    "seed": {"seed": 1},
    "target or code": {"identity": {"target": "other", "code": "c"}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_shards_of_another_regeneration_are_not_kept(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(Killed):
        Workspace(tmp_path / "reused", killing_target(target, 65)).run()
    assert list((tmp_path / "reused" / "rows").glob("shard-*.jsonl"))
    reused, fresh = Workspace(tmp_path / "reused", target), Workspace(tmp_path / "fresh", target)
    reused.run(**CHANGES[name])
    assert "starting over" in capsys.readouterr().out
    fresh.run(**CHANGES[name])
    assert reused.hashes() == fresh.hashes()


# --- other prompts ---


def counting_target(target: Target) -> tuple[Target, list[int]]:
    """A target that notes the rows of each of its forwards."""
    other, rows = copy.copy(target), []

    def forward(input_ids: Any, *arguments: Any, **options: Any) -> Any:
        rows.append(len(input_ids))
        return target.forward(input_ids, *arguments, **options)

    other.forward = forward  # type: ignore[method-assign]
    return other, rows


def test_added_prompts_cost_their_own_answers_and_give_the_bytes_of_one_run(
    target: Target, whole: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More prompts are the way to a better draft: what is answered already is not answered again."""
    some = [pair for index, pair in enumerate(PROMPTS) if index % 3]
    Workspace(tmp_path / "grown", target).run(prompts=some)
    counting, rows = counting_target(target)
    grown = Workspace(tmp_path / "grown", counting)
    manifest = grown.run()
    assert f"{len(some)} of 20 are the same and keep their answers" in capsys.readouterr().out
    assert grown.hashes() == whole.hashes()
    assert manifest.items() < json.loads((whole.rows / "manifest.json").read_text()).items()
    fresh, all_rows = counting_target(target)
    Workspace(tmp_path / "fresh", fresh).run()
    assert 0 < sum(rows) < sum(all_rows) / 2


def test_prompts_that_went_take_their_rows_with_them(target: Target, tmp_path: Path) -> None:
    some = PROMPTS[3:11]
    shrunk, fresh = Workspace(tmp_path / "shrunk", target), Workspace(tmp_path / "fresh", target)
    shrunk.run()
    shrunk.run(prompts=some)
    fresh.run(prompts=some)
    assert shrunk.hashes() == fresh.hashes()


@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_kill_while_prompts_are_added_loses_no_answer(
    target: Target, whole: Workspace, tmp_path: Path, after: int
) -> None:
    """Nor do other prompts after that kill."""
    Workspace(tmp_path, target).run(prompts=PROMPTS[:12])
    for chosen in (PROMPTS[::-1], PROMPTS):
        with pytest.raises(Killed):
            Workspace(tmp_path, killing_target(target, after)).run(prompts=chosen)
        with pytest.raises(ValueError, match="no finished regeneration"):
            read_rows(tmp_path / "rows")
    counting, rows = counting_target(target)
    resumed = Workspace(tmp_path, counting)
    resumed.run()
    assert resumed.hashes() == whole.hashes()
    fresh, all_rows = counting_target(target)
    Workspace(tmp_path / "fresh", fresh).run()
    assert sum(rows) < sum(all_rows)


@pytest.mark.parametrize("moves", [0, 2, 4, 6, 7])
@pytest.mark.parametrize("count", [20, 12], ids=["prompts are added", "the prompts from before"])
def test_a_kill_while_shards_are_set_aside_loses_no_answer(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
    moves: int,
) -> None:
    """Three shards of hidden states and three of rows are moved, their folder gets its name, and the key is
    written.
    """
    Workspace(tmp_path / "killed", target).run(prompts=PROMPTS[:12])
    left, original = iter(range(moves)), Path.replace

    def killed(path: Path, other: Path) -> Path:
        if next(left, None) is None:
            raise Killed
        return original(path, other)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", killed)
        Workspace(tmp_path / "killed", target).run()
    resumed, fresh = Workspace(tmp_path / "killed", target), Workspace(tmp_path / "fresh", target)
    capsys.readouterr()
    resumed.run(prompts=PROMPTS[:count])
    assert f"12 of {count} are the same and keep their answers" in capsys.readouterr().out
    fresh.run(prompts=PROMPTS[:count])
    assert resumed.hashes() == fresh.hashes()
    assert not [*resumed.rows.glob("*/"), *resumed.hidden.glob("*/")]


def test_a_prompt_that_changed_under_its_id_is_answered_anew(target: Target, tmp_path: Path) -> None:
    """Its first turn, a later turn, its system message; and what only names it costs nothing."""
    changed = [*PROMPTS]
    changed[2] = (replace(PROMPTS[2][0], turns=("another question",)), "train")
    changed[5] = (replace(PROMPTS[5][0], turns=(*PROMPTS[5][0].turns[:1], "quick fox")), "train")
    changed[6] = (replace(PROMPTS[6][0], system="the dog"), "train")
    changed[8] = (replace(PROMPTS[8][0], source="elsewhere"), "validation")
    reused, fresh = Workspace(tmp_path / "reused", target), Workspace(tmp_path / "fresh", target)
    reused.run()
    reused.run(prompts=changed)
    fresh.run(prompts=changed)
    assert reused.hashes() == fresh.hashes()


@pytest.mark.parametrize("gap", [False, True])
def test_a_row_keeps_the_hidden_states_that_were_written_with_it(
    target: Target, tmp_path: Path, gap: bool
) -> None:
    """Two regenerations set aside know one id under two texts; a kill may leave a gap in their numbers."""
    changed = [
        (replace(prompt, turns=("fox and dog", *prompt.turns[1:])), split) for prompt, split in PROMPTS
    ]
    Workspace(tmp_path / "a", target).run()
    with pytest.raises(Killed):
        Workspace(tmp_path / "a", killing_target(target, 40)).run(prompts=changed)
    reused, fresh = Workspace(tmp_path / "a", target), Workspace(tmp_path / "b", target)
    with pytest.raises(Killed):
        Workspace(tmp_path / "a", killing_target(target, 2)).run(prompts=changed[::-1])
    for folder in (reused.rows, reused.hidden):
        assert len(list(folder.glob("earlier-*"))) == 2
        if gap:
            shutil.rmtree(folder / "earlier-000")
    reused.run(prompts=changed)
    fresh.run(prompts=changed)
    assert reused.hashes() == fresh.hashes()
    assert not list(reused.rows.glob("earlier-*"))


def test_rows_without_hidden_states_are_not_kept_where_those_are_captured(
    whole: Workspace, workspace: Workspace
) -> None:
    workspace.run(prompts=PROMPTS[:12])
    (workspace.hidden / "shard-00001.safetensors").unlink()
    workspace.run()
    assert workspace.hashes() == whole.hashes()


# --- what is left out ---


def test_prompts_without_room_for_an_answer_are_counted(target: Target, workspace: Workspace) -> None:
    """At least 16 tokens of answer, or max_new_tokens if that is less, have to fit."""
    lengths = [
        len(chat.render_prompt(target.tokenizer, chat.conversation(prompt.turns[:1], system=prompt.system)))
        for prompt, _ in PROMPTS
    ]
    limit = sorted(lengths)[12] + 8
    manifest = workspace.run({"max_length": limit})
    fits = [prompt.id for (prompt, _), length in zip(PROMPTS, lengths, strict=True) if length + 8 <= limit]
    assert 12 < len(fits) < 20
    assert [row.id for row in workspace.written()] == fits
    assert manifest["left_out"] == {"prompt too long": 20 - len(fits)}
    assert manifest["rows"] == len(fits)


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_cut_off_answers_are_kept_or_dropped(whole: Workspace, workspace: Workspace, policy: str) -> None:
    manifest = workspace.run({"incomplete": policy})
    complete = [row for row in whole.written() if policy == "keep" or row.finish_reason == "stop"]
    assert complete
    assert workspace.written() == complete
    states = HiddenStates(workspace.hidden)
    assert all(row.id in states for row in complete)
    dropped = {row.id for row in whole.written()} - {row.id for row in complete}
    assert not any(row_id in states for row_id in dropped)
    assert bool(dropped) == (policy == "drop")
    assert manifest["rows"] == len(complete)


def test_a_shard_whose_rows_are_all_dropped_is_finished(workspace: Workspace) -> None:
    """An empty shard is a shard: otherwise each resumption would answer it again."""
    settings_of_one = {"incomplete": "drop", "group_size": 1}
    workspace.run(settings_of_one)
    before = workspace.hashes()
    assert any(path.stat().st_size == 0 for path in workspace.rows.glob("shard-*.jsonl"))
    workspace.run(settings_of_one)
    assert workspace.hashes() == before
    HiddenStates(workspace.hidden)


def test_an_id_that_occurs_twice_is_refused(workspace: Workspace) -> None:
    """One answer for two prompts would leave their shard unfinished for ever."""
    with pytest.raises(ValueError, match="prompt id 'id-3' occurs twice"):
        workspace.run(prompts=[*PROMPTS, PROMPTS[3]])
