"""Hidden states computed during training are those that regeneration captures."""

from pathlib import Path

import pytest
import torch

from eagle3.config import RegenerateSettings, parse_settings
from eagle3.data.hidden_states import OnlineStates
from eagle3.data.prompt import Prompt
from eagle3.data.regenerate import regenerate
from eagle3.data.rows import HiddenStates, read_rows
from eagle3.models.target import Target
from eagle3.parameters import read_profile

PROFILES = Path(__file__).parents[2] / "profiles"
PROMPTS = [(Prompt(f"id-{index}", "test", (f"tell me {index}",)), "train") for index in range(4)]


def settings(capture: bool) -> RegenerateSettings:
    default = parse_settings(read_profile("default", PROFILES)).regenerate
    changes = {"max_new_tokens": 8, "max_length": 64, "batch_size": 3, "dtype": "float32", "group_size": 2}
    return default.model_copy(update={**changes, "capture_hidden_states": capture})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_online_states_are_the_captured_ones(
    tiny_target_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    target = Target.load(tiny_target_folder, dtype)
    rows, hidden = tmp_path / "rows", tmp_path / "hidden"
    regenerate(target, PROMPTS, settings(capture=True), 0, rows, hidden, identity={})
    captured, online = HiddenStates(hidden), OnlineStates(target)
    found = read_rows(rows)
    assert len(found) == len(PROMPTS)
    for row in found:
        torch.testing.assert_close(online(row).hidden, captured[row.id])


def test_rows_without_captured_targets_get_the_same_ones(tiny_target: Target, tmp_path: Path) -> None:
    with_states, without = tmp_path / "with", tmp_path / "without"
    regenerate(tiny_target, PROMPTS, settings(capture=True), 0, with_states, tmp_path / "hidden", identity={})
    regenerate(tiny_target, PROMPTS, settings(capture=False), 0, without, tmp_path / "none", identity={})
    bare = read_rows(without)
    assert not bare[0].target_argmax
    online = OnlineStates(tiny_target)
    found = [tuple(online(row).target_argmax.tolist()) for row in bare]
    assert found == [row.target_argmax for row in read_rows(with_states)]
