"""What each process of a training under torchrun runs in test_parallel.py: one training, its weights saved.

Arguments: the tiny target's folder, the training's folder, and the step at which process 0 is killed, or -1.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from eagle3.data.hidden_states import OnlineStates
from eagle3.models.target import Target
from eagle3.training.parallel import started_by_torchrun
from tests.training.samples import sample_rows
from tests.training.trainings import Training

if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Target.load(Path(sys.argv[1]))
    folder, kill_at = Path(sys.argv[2]), int(sys.argv[3])
    training = Training(target, sample_rows(target), OnlineStates(target))
    with started_by_torchrun("cpu") as (processes, device):
        trainer, objective = training.trainer(
            folder, kill_at=kill_at if kill_at >= 0 else None, processes=processes
        )
        result = trainer.run()
        weights = objective.module.state_dict()
        torch.save((device, result.steps, result.tokens, weights), folder / f"{os.environ['RANK']}.pt")
