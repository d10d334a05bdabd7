"""The training loop: seeded batches, one schedule, simulated acceptance, checkpoints that resume exactly."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eagle3.config import TrainSettings
from eagle3.data.hidden_states import RowStates
from eagle3.data.rows import Row
from eagle3.provenance import hash_object, replacing
from eagle3.training.acceptance import simulate_acceptance
from eagle3.training.batches import Batch, make_batch, plan_batches
from eagle3.training.objective import Objective
from eagle3.training.optimizer import learning_rate, make_optimizers, set_learning_rate
from eagle3.training.parallel import ALONE, Processes

STATE, METRICS = "state.pt", "metrics.jsonl"
# A training in which hardly a token is supervised runs without an error and learns nothing. A single batch of
# long prompts may have few supervised tokens and do no harm: judged is the share of this many steps and more.
_MIN_SUPERVISED_SHARE, _JUDGED_STEPS = 0.01, 8
_SIMULATED_DEPTH = 4


@dataclass(frozen=True)
class TrainingResult:
    """What training ended with."""

    steps: int
    tokens: int
    best_step: int
    acceptance_length: float  # simulated, of the weights kept
    conditional_acceptance: tuple[float, ...]


class Trainer:
    """Trains the module of one objective.

    A checkpoint stores everything that changes while training: a run that was killed and resumed ends with
    the weights of one that was not.
    """

    def __init__(
        self,
        objective: Objective,
        settings: TrainSettings,
        rows: Sequence[Row],
        states: Callable[[Row], RowStates],
        hidden_size: int,
        seed: int,
        folder: Path,
        identity: dict[str, Any],
        log: Callable[[dict[str, float], int], None],
        processes: Processes = ALONE,
    ) -> None:
        """
        Args:
            rows: with both splits.
            states: what the target makes of a row; asked for when a batch is made.
            folder: checkpoints and metrics of the training under way.
            identity: what the training depends on besides `settings`; a checkpoint of another training is
                refused.
            log: called with every measurement and its step, at the end with which step was best.
            processes: that train together, all with the same arguments; a step takes a batch for each.
        """
        self._objective, self._settings, self._states = objective, settings, states
        self._processes = processes
        self._hidden_size, self._seed, self._folder, self._log = hidden_size, seed, folder, log
        together = {"processes": processes.size} if processes.size > 1 else {}
        self._key = hash_object({"settings": settings.model_dump(), "seed": seed, **identity, **together})
        self._train = [
            row for row in rows if row.split == "train" and len(row.token_ids) <= settings.max_length
        ]
        validation = [
            row for row in rows if row.split == "validation" and len(row.token_ids) <= settings.max_length
        ]
        if left_out := len(rows) - len(self._train) - len(validation):
            print(
                f"{left_out} rows are longer than train.max_length {settings.max_length}: left out",
                flush=True,
            )
        if not self._train or not validation:
            raise ValueError(
                f"{len(self._train)} training and {len(validation)} validation rows of at most "
                f"train.max_length {settings.max_length} tokens: both are needed; raise train.max_length or "
                "prompts.validation_share"
            )
        self._validation = _first_tokens(validation, settings.validation_tokens)
        self._plan = self._plan_steps()
        module = objective.module
        self._device = next(module.parameters()).device
        self._optimizers = make_optimizers(
            module, settings.optimizer, settings.lr, settings.betas, settings.weight_decay
        )
        self._average = copy.deepcopy(module)
        self._best: dict[str, Tensor] = {}
        self._step, self._tokens = 0, 0
        self._seen_steps, self._seen_supervised, self._seen_tokens = 0, 0, 0
        self._best_step, self._best_length = 0, -math.inf
        self._best_conditional: tuple[float, ...] = ()

    def run(self) -> TrainingResult:
        """Train to the end and leave the best averaged weights in the objective's module, of process 0.

        Raises:
            ValueError: at a loss or gradient that is not finite, or when hardly a token is supervised; with
                the step.
        """
        with self._processes.in_turn():  # process 0 may discard what is there
            self._resume()
        # Each process found the same start for itself, on hardware that may round otherwise.
        with torch.no_grad():
            self._processes.share([*self._objective.module.parameters(), *self._average.parameters()])
        settings, steps = self._settings, len(self._plan)
        started, first = time.monotonic(), self._tokens
        quiet = not self._processes.first
        with tqdm(total=steps, initial=self._step, unit="step", desc="train", disable=quiet) as bar:
            while self._step < steps:
                measured = self._train_step()
                if not self._processes.first:
                    continue
                rate = (self._tokens - first) / (time.monotonic() - started)
                bar.update()
                bar.set_postfix_str(f"loss {measured['loss']:.3f}, {rate:.0f} tokens/s")
                if self._step % settings.validate_every == 0 or self._step == steps:
                    measured |= self._validate()
                measured |= {"tokens_per_second": rate, "tokens": float(self._tokens)}
                self._record(measured)
                if self._step % settings.checkpoint_every == 0 or self._step == steps:
                    self._save()
        if self._processes.first:
            self._objective.module.load_state_dict(self._best)
            self._objective.finish()
            best = {"best_step": float(self._best_step), "best_acceptance_length": self._best_length}
            self._log(best, steps)
        return TrainingResult(steps, self._tokens, self._best_step, self._best_length, self._best_conditional)

    def _plan_steps(self) -> list[list[list[int]]]:
        """The rows of every step, a batch for each process, epoch after epoch, up to the token budget."""
        lengths = [len(row.token_ids) for row in self._train]
        plan: list[list[int]] = []
        tokens, epoch = 0, 0
        size = self._processes.size
        while tokens < self._settings.token_budget:
            for batch in plan_batches(lengths, self._settings.batch_tokens, f"{self._seed}:{epoch}"):
                plan.append(batch)
                tokens += sum(lengths[index] for index in batch)
                if tokens >= self._settings.token_budget:
                    break
            epoch += 1
        plan += [plan[-1]] * (-len(plan) % size)  # every process has a batch in the last step, too
        return [plan[start : start + size] for start in range(0, len(plan), size)]

    def _batch(self, rows: Sequence[Row]) -> Batch:
        return make_batch(rows, self._states, self._hidden_size).to(self._device)

    def _train_step(self) -> dict[str, float]:
        module, settings = self._objective.module, self._settings
        module.train()
        rank, size = self._processes.rank, self._processes.size
        batches = self._plan[self._step]
        batch = self._batch([self._train[index] for index in batches[rank]])
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._step * size + rank)
        lower = getattr(torch, settings.dtype)
        with torch.autocast(self._device.type, lower, enabled=lower != torch.float32):
            terms = self._objective.loss(batch, self._step / len(self._plan), generator)
        self._check_supervision(terms.supervised, batch.tokens)
        terms.loss.backward()
        mean_loss = terms.loss.detach().clone()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        self._processes.average([mean_loss, *gradients])
        norm = nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
        loss = float(mean_loss)
        if not math.isfinite(loss) or not bool(torch.isfinite(norm)):
            raise ValueError(
                f"step {self._step}: loss {loss}, gradient norm {float(norm)}; the last "
                "checkpoint is intact: lower train.lr or set train.dtype to float32, and run again"
            )
        lr = learning_rate(self._step, len(self._plan), settings.lr, settings.warmup_share)
        set_learning_rate(self._optimizers, lr)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._average_weights()
        self._step += 1
        self._tokens += sum(len(self._train[index].token_ids) for rows in batches for index in rows)
        losses = {f"losses/depth_{depth}": value for depth, value in enumerate(terms.losses)}
        accuracy = {f"accuracy/depth_{depth}": value for depth, value in enumerate(terms.accuracy)}
        return {"loss": loss, "lr": lr, "gradient_norm": float(norm), **losses, **accuracy}

    def _check_supervision(self, supervised: int, tokens: int) -> None:
        self._seen_steps += 1
        self._seen_supervised += supervised
        self._seen_tokens += tokens
        judged = self._seen_steps >= _JUDGED_STEPS or self._step + 1 == len(self._plan)
        if judged and self._seen_supervised < _MIN_SUPERVISED_SHARE * self._seen_tokens:
            raise ValueError(
                f"step {self._step}: {self._seen_supervised} of {self._seen_tokens} tokens were supervised "
                "so far; check that the draft vocabulary belongs to the data and that the rows hold answers"
            )

    @torch.no_grad()
    def _average_weights(self) -> None:
        """Exponential average; its decay grows with the step, so that the start is forgotten soon."""
        decay = min(self._settings.ema, (self._step + 1) / (self._step + 10))
        for mean, parameter in zip(
            self._average.parameters(), self._objective.module.parameters(), strict=True
        ):
            mean.lerp_(parameter, 1 - decay)

    def _validate(self) -> dict[str, float]:
        """Simulated acceptance of the averaged weights; keeps the best ones seen."""
        module = self._objective.module
        current = copy.deepcopy(module.state_dict())
        module.load_state_dict(self._average.state_dict())
        module.eval()
        batches = plan_batches(
            [len(row.token_ids) for row in self._validation], self._settings.batch_tokens, ""
        )
        simulated = simulate_acceptance(
            self._objective,
            (self._batch([self._validation[index] for index in batch]) for batch in batches),
            _SIMULATED_DEPTH,
        )
        module.load_state_dict(current)
        if simulated.length > self._best_length:
            self._best_length, self._best_step = simulated.length, self._step
            self._best_conditional = simulated.conditional
            self._best = copy.deepcopy(self._average.state_dict())
        depths = {f"acceptance/depth_{depth}": value for depth, value in enumerate(simulated.conditional)}
        return {"acceptance_length": simulated.length, **depths}

    def _record(self, measured: dict[str, float]) -> None:
        with (self._folder / METRICS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": self._step, **measured}) + "\n")
        self._log(measured, self._step)

    def _save(self) -> None:
        state = {
            "key": self._key,
            "step": self._step,
            "tokens": self._tokens,
            "module": self._objective.module.state_dict(),
            "average": self._average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "best": self._best,
            "best_step": self._best_step,
            "best_length": self._best_length,
            "best_conditional": self._best_conditional,
            "seen": (self._seen_steps, self._seen_supervised, self._seen_tokens),
        }
        with replacing(self._folder / STATE) as temporary:
            torch.save(state, temporary)
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())

    def _resume(self) -> None:
        path = self._folder / STATE
        self._folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if self._processes.first:
                (self._folder / METRICS).unlink(missing_ok=True)
            return
        state = torch.load(path, weights_only=True, map_location=self._device)
        if state["key"] != self._key:
            print(f"{path}: of a training with other settings or data; starting over", flush=True)
            path.unlink()  # first: a checkpoint without its metrics must not be found later
            (self._folder / METRICS).unlink(missing_ok=True)
            return
        self._step, self._tokens = state["step"], state["tokens"]
        self._objective.module.load_state_dict(state["module"])
        self._average.load_state_dict(state["average"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._best, self._best_step = state["best"], state["best_step"]
        self._best_length = state["best_length"]
        self._best_conditional = tuple(state["best_conditional"])
        # What process 0 counted: the others see about the same share.
        self._seen_steps, self._seen_supervised, self._seen_tokens = state["seen"]
        if not self._processes.first:
            return
        self._forget_later_metrics()
        print(f"resuming at step {self._step} of {len(self._plan)}", flush=True)

    def _forget_later_metrics(self) -> None:
        """Drop what was recorded after the checkpoint: those steps are taken again."""
        path = self._folder / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self._step]
        with replacing(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _first_tokens(rows: Sequence[Row], tokens: int) -> list[Row]:
    """The first rows that together have at least `tokens` tokens."""
    chosen: list[Row] = []
    total = 0
    for row in rows:
        if total >= tokens:
            break
        chosen.append(row)
        total += len(row.token_ids)
    return chosen


def describe(result: TrainingResult) -> dict[str, Any]:
    """The result as it goes into manifests."""
    return asdict(result)
