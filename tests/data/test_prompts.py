"""The prompts stage as a whole, with a fake target: what goes in, what comes out, what a kill leaves
behind.
"""

import json
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3 import paths
from eagle3.config import PromptSettings, SelfGenerated, TaskSettings
from eagle3.data.completion import Completion, PlannedPrompt
from eagle3.data.prompts import MANIFEST, QUARANTINE, TRAIN, load_tasks, prepare_prompts
from eagle3.provenance import write_json
from tests.data.tiny_tokenizer import chatml_tokenizer
from tests.test_pipeline import ROOT, modules_of, stages

TOKENIZER = chatml_tokenizer()
EVALUATION = "How many of the seventeen green bottles on the long wall fell down before breakfast today?"


class FakeTarget:
    """Completes each prompt with a text of its own; can be killed after some completions."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.asked: list[str] = []
        self._dies_after = dies_after

    def __call__(self, plan: Sequence[PlannedPrompt]) -> Iterable[Completion]:
        for planned in reversed(plan):  # any order is allowed
            if self._dies_after is not None and len(self.asked) >= self._dies_after:
                raise KeyboardInterrupt
            self.asked.append(planned.id)
            words = " ".join(f"{planned.id[-6:]}{i}" for i in range(6))
            yield Completion(planned.id, f' {words}?\n    """', "stop")


def stage(tmp_path: Path, generate: FakeTarget, count: int = 60, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "files": (),
        "wheels": (),
        "datasets": (),
        "limit": 0,
        "validation_share": 0.2,
    } | changes
    own = SelfGenerated(
        count=count, batch_size=8, temperature=1.0, top_p=0.95, max_new_tokens=32, dtype="float32"
    )
    task = tmp_path / "question.jsonl"
    task.write_text(json.dumps({"question_id": 1, "turns": [EVALUATION]}))
    return prepare_prompts(
        TOKENIZER,
        PromptSettings(self_generated=own, **settings),
        TaskSettings.model_construct(names=(), files={"bottles": str(task)}, tuning_share=0.5),
        seed=1,
        generate=generate,
        target_hash="target",
        prompts_folder=tmp_path / "prompts",
        tasks_folder=tmp_path / "tasks",
        journal_path=tmp_path / "runs" / "completions.jsonl",
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stage_writes_prompts_tasks_manifest_and_quarantine(tmp_path: Path) -> None:
    extra = tmp_path / "extra.jsonl"
    lines = [
        {"prompt": EVALUATION.upper()},
        {"prompt": "Please repeat: " + EVALUATION + " Thank you."},
        {"prompt": "A prompt of our own"},
        {"prompt": "a prompt of our OWN!"},
        {"prompt": "Smuggled <|im_end|> token"},
        {"messages": []},
    ]
    extra.write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = stage(tmp_path, FakeTarget(), files=(str(extra),))
    train = rows(tmp_path / "prompts" / TRAIN)
    assert set(train[0]) == {"id", "source", "split", "turns", "system"}
    assert [row["turns"] for row in train if row["source"] == "extra.jsonl"] == [["A prompt of our own"]]
    assert manifest["decontamination"]["removed"] == {"bottles:exact": 1, "bottles:ngram": 1}
    assert manifest["duplicates"] == {"exact": 1}
    assert manifest["read"][str(extra)] == {"prompts": 5, "quarantined": 1, "refused": {"special_token": 1}}
    assert manifest["self_generated"]["planned"] == 60
    assert sum(manifest["splits"].values()) == sum(manifest["sources"].values()) == len(train)
    assert json.loads((tmp_path / "prompts" / MANIFEST).read_text()) == manifest
    steps = [row["step"] for row in rows(tmp_path / "prompts" / QUARANTINE)]
    assert sorted(steps) == ["decontaminate", "decontaminate", "duplicate", "filter", "read"]
    assert rows(tmp_path / "tasks" / "bottles.jsonl")[0]["turns"] == [EVALUATION]


def test_a_damaged_file_costs_its_bad_rows_alone(tmp_path: Path) -> None:
    extra = tmp_path / "extra.jsonl"
    extra.write_bytes(
        b'{"prompt": "A prompt of our own"}\n{"prompt": "caf\xe9"}\n{"prompt": "\\ud83d"}\n{"\\ud83d": 1}\n'
    )
    manifest = stage(tmp_path, FakeTarget(), files=(str(extra),))
    assert manifest["read"][str(extra)] == {"prompts": 1, "quarantined": 3, "refused": {}}
    quarantined = [row for row in rows(tmp_path / "prompts" / QUARANTINE) if row["step"] == "read"]
    assert [(row["source"], row["line"]) for row in quarantined] == [(str(extra), line) for line in (2, 3, 4)]


def test_order_of_the_rows_mixes_sources_and_both_splits_are_there(tmp_path: Path) -> None:
    manifest = stage(tmp_path, FakeTarget(), count=120)
    train = rows(tmp_path / "prompts" / TRAIN)
    assert len({row["source"] for row in train[:20]}) > 5
    assert set(manifest["splits"]) == {"train", "validation"}


def test_second_turns_extend_their_prompt_and_do_not_repeat_it(tmp_path: Path) -> None:
    manifest = stage(tmp_path, FakeTarget(), count=200)
    train = rows(tmp_path / "prompts" / TRAIN)
    first_turns = [row["turns"][0] for row in train]
    assert len(set(first_turns)) == len(first_turns)
    assert manifest["turns"]["2"] == manifest["self_generated"]["follow_ups_kept"] > 10


def test_killed_run_goes_on_and_ends_with_the_same_files(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    stage(whole, FakeTarget())
    with pytest.raises(KeyboardInterrupt):
        stage(killed, FakeTarget(dies_after=25))
    journal = killed / "runs" / "completions.jsonl"
    torn = journal.read_bytes()[:-7]  # the kill came in the middle of a line
    journal.write_bytes(torn)
    second = FakeTarget()
    stage(killed, second)
    assert len([i for i in second.asked if not i.endswith("-2")]) == 60 - 24
    manifests = [json.loads((folder / "prompts" / MANIFEST).read_text()) for folder in (whole, killed)]
    assert manifests[0]["self_generated"] == manifests[1]["self_generated"]
    for name in (TRAIN, QUARANTINE):
        assert (killed / "prompts" / name).read_bytes() == (whole / "prompts" / name).read_bytes()


def test_completions_of_another_sampling_are_not_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage(tmp_path, FakeTarget(), count=20)
    again = FakeTarget()
    stage(tmp_path, again, count=20)
    assert again.asked == []
    journal = tmp_path / "runs" / "completions.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([json.dumps({"key": "of another target"}), *lines[1:]]) + "\n")
    stage(tmp_path, again, count=20)
    assert len([i for i in again.asked if not i.endswith("-2")]) == 20
    assert "of another target, sampling or seed; starting over" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["prompts", "regenerate"])
def test_what_was_sampled_is_kept_when_other_code_changes(name: str) -> None:
    """Wider stems are no reason to answer every prompt again, nor a new regeneration to sample them again."""
    used = {path.relative_to(ROOT).as_posix() for path in modules_of(ROOT / "experiments" / f"{name}.py")}
    assert {dep for dep in stages()[name]["deps"] if dep.startswith("eagle3/data")} <= used
    planning = {f"eagle3/data/{module}.py" for module in ("filters", "follow_ups", "slots", "stems")}
    assert bool(planning & used) == (name == "prompts")


def test_layers_that_a_draft_reads_are_no_reason_to_sample_prompts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiments")
    for name in ("eagle3", "experiments", "dvc.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    sampled_from = runpy.run_path("experiments/prompts.py", run_name="prompts")["sampled_from"]
    keys = []
    for weights, layers in (("a", [1]), ("a", [2]), ("b", [1])):
        write_json(paths.TARGET / "target.json", {"hash": weights, "capture_layers": layers})
        keys.append(sampled_from())
    assert keys[0] == keys[1] != keys[2]


def test_limit_keeps_a_stable_part(tmp_path: Path) -> None:
    stage(tmp_path, FakeTarget(), limit=10)
    ten = rows(tmp_path / "prompts" / TRAIN)
    stage(tmp_path, FakeTarget(), limit=20)
    assert ten == rows(tmp_path / "prompts" / TRAIN)[:10]


def test_tiny_sets_still_have_a_validation_prompt(tmp_path: Path) -> None:
    manifest = stage(tmp_path, FakeTarget(), limit=2, validation_share=0.001)
    assert manifest["splits"] == {"train": 1, "validation": 1}


def test_conversations_that_begin_alike_share_a_split(tmp_path: Path) -> None:
    extra = tmp_path / "extra.jsonl"
    lines = [
        {"turns": ["Hello there", f"{'very '.join(str(i * j) for j in range(20))} long"]}
        for i in range(1, 30)
    ]
    extra.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage(tmp_path, FakeTarget(), files=(str(extra),), validation_share=0.49)
    splits = [row["split"] for row in rows(tmp_path / "prompts" / TRAIN) if row["source"] == "extra.jsonl"]
    assert len(splits) > 5
    assert len(set(splits)) == 1


def test_no_prompts_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"0 training prompts are left.*raise prompts\.self_generated\.count"
    ):
        stage(tmp_path, FakeTarget(), count=0)


def test_files_of_tasks_no_longer_wanted_are_removed(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "old.jsonl").write_text("{}")
    stage(tmp_path, FakeTarget(), count=20)
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["bottles.jsonl"]


def test_file_cannot_take_the_name_of_a_built_in_task() -> None:
    settings = TaskSettings.model_construct(names=(), files={"gsm8k": "x.jsonl"}, tuning_share=0.5)
    with pytest.raises(ValueError, match="'gsm8k' is the name of a built-in task"):
        load_tasks(settings)
