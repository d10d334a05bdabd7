"""Training of the independent draft: distillation of the target's distribution, without its hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.models.independent import IndependentModule
from eagle3.training.batches import Batch
from eagle3.training.losses import soft_cross_entropy
from eagle3.training.objective import LossTerms, accuracy_on_answers, supervision
from eagle3.training.unroll import shift_left

# Tokens outside the draft vocabulary that each batch scores beside it, drawn anew: without them nothing would
# keep their logits down, and decoding uses the whole head.
_OTHER_TOKENS = 4096


class IndependentObjective:
    """Soft cross-entropy against the target, on the same tokens as the EAGLE drafts.

    The indices are theirs too: position t is judged on token t + 2. A language model predicts that from its
    state at t + 1. Worked, on the row x0..x4: position 1 is judged on x3, from the state at index 2, which
    has read x0 x1 x2, against final[2], the target's state there.
    """

    def __init__(
        self,
        module: IndependentModule,
        embedding: Tensor,
        head: Tensor,
        vocabulary: Tensor,
        prompt_loss: float,
    ) -> None:
        """
        Args:
            embedding, head: the target's, [V, H].
            vocabulary: target ids of the draft vocabulary, [Vd].
        """
        self.module, self._embedding, self._head = module, embedding, head
        self._vocabulary, self._prompt_loss = vocabulary, prompt_loss
        self._covered = torch.zeros(head.shape[0], dtype=torch.bool, device=head.device)
        self._covered[vocabulary] = True
        self._others = (~self._covered).nonzero()[:, 0]

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        """See `Objective.loss`."""
        hidden = self.module(F.embedding(batch.token_ids, self._embedding))
        weights = supervision(batch, 0, self._prompt_loss, self._covered)
        rows, positions = (weights > 0).nonzero(as_tuple=True)
        weight = weights[rows, positions]
        drawn = torch.randperm(len(self._others), generator=generator)[:_OTHER_TOKENS]
        tokens = torch.cat((self._vocabulary, self._others[drawn.to(self._others.device)]))
        head = self._head[tokens]
        logits = (hidden[rows, positions + 1] @ head.T).float()
        goal = (batch.final[rows, positions + 1] @ head.T).float().softmax(-1)
        loss = soft_cross_entropy(logits, goal, weight) / weight.sum().clamp_min(1)
        accuracy = accuracy_on_answers(tokens, logits, batch, rows, positions, 0)
        return LossTerms(loss, (float(loss.detach()),), (accuracy,), len(rows))

    @torch.no_grad()
    def predictions(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        """See `Objective.predictions`; one forward, since the model reads the row's own tokens alone."""
        hidden = self.module(F.embedding(batch.token_ids, self._embedding))
        following = self._vocabulary[(hidden @ self._head[self._vocabulary].T).argmax(-1)]  # of token t + 1
        for step in range(depth):
            yield shift_left(following, step + 1)

    def finish(self) -> None:
        """See `Objective.finish`: the module is stored as it is."""
