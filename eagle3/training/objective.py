"""What a draft is trained for: loss and per-depth predictions of a batch, for EAGLE-3 and for EAGLE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.config import Eagle3Settings, EagleSettings
from eagle3.models.eagle import EagleLayer, EagleModule
from eagle3.models.eagle3 import Eagle3Module
from eagle3.training.attention import rotate, test_time_attention
from eagle3.training.batches import Batch
from eagle3.training.losses import LOSSES
from eagle3.training.unroll import Unroll, choose_positions, shift_left


@dataclass(frozen=True)
class LossTerms:
    """The loss of a batch and what it was made of."""

    loss: Tensor  # scalar, mean over supervised positions
    losses: tuple[float, ...]  # the same by depth, before the depths are weighed
    accuracy: tuple[float, ...]  # of the draft's argmax against the target's, on answers, by depth
    supervised: int  # positions that carried loss at the first depth


class Objective(Protocol):
    """Training and validation of one family of drafts."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        """Loss at `progress` (0 to 1) of the training; `generator` supplies noise."""
        ...

    def predictions(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        """The draft's most likely token at each depth, as target ids [B, T].

        At depth i, position t predicts token t + 2 + i from tokens up to t + 1 + i and target states up to t.
        """
        ...

    def finish(self) -> None:
        """Bring the trained module into the form that is stored and decoded with."""
        ...


def supervision(batch: Batch, step: int, prompt_loss: float, covered: Tensor) -> Tensor:
    """Loss weights of step `step`, [B, T].

    Position t is judged against the target's distribution of token t + 2 + step, which final[t + 1 + step]
    gives. It counts 1 where that token is the target's answer and `prompt_loss` where it is part of a prompt;
    nothing beyond the row, nor where the target's most likely token is outside the draft vocabulary.

    Worked: a row of 5 tokens, step 0. final exists at 0..3, so t + 1 <= 3: positions 0, 1, 2 are judged,
    position 2 against final[3], the distribution of token 4.

    Args:
        covered: [V] bool, the draft vocabulary.
    """
    argmax = shift_left(batch.target_argmax, step + 1)
    positions = torch.arange(batch.token_ids.shape[1], device=argmax.device)[None]
    within = positions + 2 + step < batch.lengths[:, None]
    answer = shift_left(batch.answer_mask, step + 2)
    weights = torch.where(answer, 1.0, prompt_loss)
    return weights * (within & covered[argmax.clamp_min(0)])


class Eagle3Objective:
    """Direct token prediction under training-time test."""

    def __init__(
        self,
        module: Eagle3Module,
        embedding: Tensor,
        head: Tensor,
        settings: Eagle3Settings,
        prompt_loss: float,
        scale: Tensor,
    ) -> None:
        """
        Args:
            embedding, head: the target's, [V, H].
            scale: what `fc` reads is divided by it, [n H], and `fc` is trained on the quotient;
                `finish` folds it into the weights.
        """
        self.module, self._settings, self._prompt_loss = module, settings, prompt_loss
        self._scale = scale
        self._embedding, self._rotary = embedding, module.config.rotary().to(embedding.device)
        self._goal_head = head[module.draft_to_target]  # [Vd, H]
        self._loss = LOSSES[settings.loss]

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        count = [phase.steps for phase in self._settings.test_time if phase.from_share <= progress][-1]
        goals = (
            (batch.final @ self._goal_head.T).float().softmax(-1)
        )  # [B, T, Vd]; goals[t] is for token t + 1
        total = torch.zeros((), device=batch.final.device)
        weight_sum, supervised, losses, accuracy = 0.0, 0, [], []
        unroll = Unroll(self.module, self._embedding, self._rotary)
        second = supervision(batch, 1, self._prompt_loss, self.module.t2d) > 0
        chosen, stands_for = choose_positions(second, self._settings.test_time_share, generator)
        for step, output in enumerate(unroll.steps(batch.token_ids, self._reads(batch), count, chosen)):
            weights = supervision(batch, step, self._prompt_loss, self.module.t2d)
            if step > 0:
                weights = weights.gather(1, chosen) * stands_for  # [B, K], as `output` has it
            rows, columns = (weights > 0).nonzero(as_tuple=True)
            positions = columns if step == 0 else chosen[rows, columns]
            normed = self.module.norm(output[rows, columns])
            logits = self.module.lm_head(normed).float()  # [M, Vd]
            goal = goals[rows, positions + 1 + step]
            decay = self._settings.step_decay**step
            weight = weights[rows, columns]
            step_loss = self._loss(logits, goal, weight)
            if self._settings.feature_constraint:
                feature = batch.final[rows, positions + 1 + step]
                regression = F.smooth_l1_loss(normed, feature, reduction="none").mean(-1)
                step_loss = step_loss + self._settings.feature_constraint * (regression * weight).sum()
            step_loss = step_loss / weight.sum().clamp_min(1)
            total = total + decay * step_loss
            weight_sum += decay
            losses.append(float(step_loss.detach()))
            accuracy.append(
                accuracy_on_answers(self.module.draft_to_target, logits, batch, rows, positions, step)
            )
            supervised = supervised or len(rows)
        return LossTerms(total / weight_sum, tuple(losses), tuple(accuracy), supervised)

    @torch.no_grad()
    def predictions(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        mapping = self.module.draft_to_target
        unroll = Unroll(self.module, self._embedding, self._rotary)
        for output in unroll.steps(batch.token_ids, self._reads(batch), depth):
            yield mapping[self.module.lm_head(self.module.norm(output)).argmax(-1)]

    def _reads(self, batch: Batch) -> Tensor:
        return self.module.reads(batch.captured, batch.final) / self._scale

    @torch.no_grad()
    def finish(self) -> None:
        """See `Objective.finish`: fc (h / scale) = (fc / scale) h."""
        self.module.fc.weight.div_(self._scale)
        self._scale = torch.ones_like(self._scale)


class EagleObjective:
    """Feature regression (SmoothL1) and classification through the target's head (arXiv 2401.15077).

    The classification runs over the draft vocabulary's rows of the head: nearly all of the target's mass at a
    fraction of the cost. Decoding uses the whole head.
    """

    def __init__(
        self,
        module: EagleModule,
        embedding: Tensor,
        head: Tensor,
        vocabulary: Tensor,
        settings: EagleSettings,
        prompt_loss: float,
    ) -> None:
        """vocabulary: target ids of the draft vocabulary, [Vd]."""
        self.module, self._settings, self._prompt_loss = module, settings, prompt_loss
        self._embedding, self._rotary = embedding, module.config.rotary().to(embedding.device)
        self._vocabulary, self._goal_head = vocabulary, head[vocabulary]
        self._covered = torch.zeros(head.shape[0], dtype=torch.bool, device=head.device)
        self._covered[vocabulary] = True

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        noise = (torch.rand(batch.final.shape, generator=generator) * 2 - 1) * self._settings.feature_noise
        predicted = self._forward(batch.token_ids, batch.final + noise.to(batch.final.device), 0)
        weights = supervision(batch, 0, self._prompt_loss, self._covered)
        rows, positions = (weights > 0).nonzero(as_tuple=True)
        chosen, weight = predicted[rows, positions], weights[rows, positions]
        feature = batch.final[rows, positions + 1]
        regression = (F.smooth_l1_loss(chosen, feature, reduction="none").mean(-1) * weight).sum()
        logits = (chosen @ self._goal_head.T).float()
        goal = (feature @ self._goal_head.T).float().softmax(-1)
        classification = LOSSES["soft_ce"](logits, goal, weight)
        loss = regression + self._settings.classification_weight * classification
        loss = loss / weight.sum().clamp_min(1)
        accuracy = accuracy_on_answers(self._vocabulary, logits, batch, rows, positions, 0)
        return LossTerms(loss, (float(loss.detach()),), (accuracy,), len(rows))

    @torch.no_grad()
    def predictions(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden = batch.final
        for step in range(depth):
            hidden = self._forward(shift_left(batch.token_ids, step), hidden, step, keys, values)
            yield self._vocabulary[(hidden @ self._goal_head.T).argmax(-1)]

    def finish(self) -> None:
        """See `Objective.finish`: the module is stored as it is."""

    def _forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        step: int,
        keys: list[Tensor] | None = None,
        values: list[Tensor] | None = None,
    ) -> Tensor:
        """Token t + 1 beside the feature of t gives the feature of t + 1, [B, T, H]."""
        keys, values = [] if keys is None else keys, [] if values is None else values
        layer, config = self.module.layers[0], self.module.config
        assert isinstance(layer, EagleLayer)
        embedded = F.embedding(shift_left(token_ids, 1), self._embedding)
        x = self.module.fc(torch.cat((embedded, hidden), dim=-1))
        batch, length, _ = x.shape
        positions = torch.arange(step, step + length, device=x.device)[None]
        cos, sin = (table[0] for table in self._rotary(x, positions))

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, config.head_dim).transpose(1, 2)

        query = rotate(heads(layer.self_attn.q_proj(x)), cos, sin)
        keys.append(rotate(heads(layer.self_attn.k_proj(x)), cos, sin))
        values.append(heads(layer.self_attn.v_proj(x)))
        attended = test_time_attention(query, keys, values, None).transpose(1, 2).reshape(batch, length, -1)
        x = x + layer.self_attn.o_proj(attended)
        return x + layer.mlp(layer.post_attention_layernorm(x))


@torch.no_grad()
def accuracy_on_answers(
    mapping: Tensor, logits: Tensor, batch: Batch, rows: Tensor, positions: Tensor, step: int
) -> float:
    """Share of answer positions at which the draft's argmax is the target's."""
    answer = batch.answer_mask[rows, positions + 2 + step]
    if not bool(answer.any()):
        return 0.0
    goal = batch.target_argmax[rows, positions + 1 + step]
    return float((mapping[logits.argmax(-1)] == goal)[answer].float().mean())
