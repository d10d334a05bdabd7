"""A batch as a decoder of one prompt: what decoding several requests together does to one of them."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.decoding.batch import BatchDecoder
from eagle3.decoding.generation import Generation, Round, rounds_of_lengths
from eagle3.decoding.sampling import Sampling


class CopiesDecoder:
    """Answers a prompt with as many copies of it as the batch has rows, all in step.

    The rows' arithmetic is that of different prompts of one length, so that the time says what a method costs
    in a full batch, while answers and acceptance stay those of the prompt alone.
    """

    def __init__(self, batch: BatchDecoder, depth: int = 0) -> None:
        """
        Args:
            depth: of the deepest node that the batch's drafter drafts; without a drafter it is not read.
        """
        self.name = batch.name
        self._batch, self._depth = batch, depth

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """See `Decoder.generate`; the answer is the first copy's, the times are those of the whole batch."""
        copies, drafter = self._batch.batch_size, self._batch.drafter
        result = self._batch.generate([prompt_ids] * copies, max_new_tokens, [sampling] * copies)
        answer = result.answers[0]
        rounds: tuple[Round, ...] = ()
        if drafter is not None:
            drafting, verifying = result.draft_seconds, result.verify_seconds
            rest = result.decode_seconds - drafting - verifying
            rounds = rounds_of_lengths(
                answer.acceptance_lengths, drafter.max_nodes, self._depth, drafting, verifying, rest
            )
        return Generation(
            answer.token_ids, answer.finish_reason, result.prefill_seconds, result.decode_seconds, rounds
        )
