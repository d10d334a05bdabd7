"""Training in several processes: the steps of one process over all their batches together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle3.training.batches import make_batch
from eagle3.training.optimizer import learning_rate, make_optimizers, set_learning_rate
from eagle3.training.parallel import ALONE, Processes, started_by_torchrun
from eagle3.training.trainer import METRICS
from tests.training.samples import train_settings
from tests.training.trainings import Training, assert_equal_weights

PROGRAM = Path(__file__).with_name("one_of_several.py")
Saved = tuple[str, int, int, dict[str, Tensor]]


def torchrun(target: Path, folder: Path, kill_at: int = -1) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine."""
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launcher, str(PROGRAM), str(target), str(folder), str(kill_at)]
    return subprocess.run(words, capture_output=True, text=True)


def saved(folder: Path) -> list[Saved]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def together(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    done = torchrun(tiny_target_folder, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_take_the_steps_of_one_over_both_batches(
    training: Training, together: Path, tmp_path: Path
) -> None:
    """Process 1 ends with the last step's weights, process 0 with the best."""
    settings = train_settings()
    trainer, objective = training.trainer(tmp_path, processes=Processes(0, 2))
    module, plan = objective.module, trainer._plan
    optimizers = make_optimizers(
        module, settings.optimizer, settings.lr, settings.betas, settings.weight_decay
    )
    for step, batches in enumerate(plan):
        assert len(batches) == 2
        for rank, indices in enumerate(batches):
            rows = [trainer._train[index] for index in indices]
            batch = make_batch(rows, training.states, training.target.hidden_size)
            generator = torch.Generator().manual_seed(1 * 1_000_003 + step * 2 + rank)
            (objective.loss(batch, step / len(plan), generator).loss / 2).backward()
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
        set_learning_rate(optimizers, learning_rate(step, len(plan), settings.lr, settings.warmup_share))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (device, steps, tokens, best), (_, other_steps, other_tokens, last) = saved(together)
    assert device == "cpu"
    assert (steps, tokens) == (other_steps, other_tokens)
    assert steps == len(plan)
    assert tokens >= settings.token_budget
    for name, value in module.state_dict().items():
        torch.testing.assert_close(last[name], value)
    assert any(not torch.equal(last[name], best[name]) for name in best)
    assert len((together / METRICS).read_text().splitlines()) == len(plan)


def test_a_killed_training_of_two_processes_ends_with_the_same_weights(
    tiny_target_folder: Path, together: Path, tmp_path: Path
) -> None:
    killed = torchrun(tiny_target_folder, tmp_path, kill_at=5)
    assert killed.returncode != 0
    assert "Killed" in killed.stderr
    resumed = torchrun(tiny_target_folder, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("resuming at step") == 1
    for mine, whole in zip(saved(tmp_path), saved(together), strict=True):
        assert mine[:3] == whole[:3]
        assert_equal_weights(mine[3], whole[3])


def test_alone_nothing_is_averaged_and_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with started_by_torchrun("cuda") as (processes, device):
        assert (processes, device) == (ALONE, "cuda")
    values = torch.tensor([1.0, 2.0])
    ALONE.average([values])
    ALONE.share([values])
    with ALONE.in_turn():
        assert values.tolist() == [1.0, 2.0]
    assert ALONE.first
    assert not Processes(1, 2).first
