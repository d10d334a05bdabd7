"""Data parallel training: several processes, one a GPU, that `torchrun` starts; alone, it is one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """The processes of one training. Each takes a batch of its own at every step; gradients are averaged.

    Process 0 alone validates, writes and reports.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over the processes."""
        if self.size == 1:
            return
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(self.size)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give each tensor the values that process 0 has."""
        if self.size == 1:
            return
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Process 0 goes through the block before the others do, and goes on when they are through."""
        if self.size > 1 and not self.first:
            dist.barrier()
        yield
        if self.size > 1:
            if self.first:
                dist.barrier()
            dist.barrier()


ALONE = Processes()


@contextmanager
def started_by_torchrun(device: str) -> Iterator[tuple[Processes, str]]:
    """The processes that this one belongs to, and its own device; ALONE where torchrun did not start it.

    Args:
        device: "cuda", of which every process takes the one of its local rank, or "cpu".
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Processes(dist.get_rank(), size), device
    finally:
        dist.destroy_process_group()
