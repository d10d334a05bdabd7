"""A batch as a decoder of one prompt: what decoding several requests together does to one of them."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.decoding.batch import BatchDecoder
from eagle3.decoding.generation import Generation, Round
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
        """See `Decoder.generate`; the answer is the first copy's, the times are those of the whole batch.

        A batch does not record a round's tree: nodes and depth are the most that there can be, and drafts
        accepted beyond the end of the answer are not seen.
        """
        copies = self._batch.batch_size
        result = self._batch.generate([prompt_ids] * copies, max_new_tokens, [sampling] * copies)
        answer = result.answers[0]
        rounds: list[Round] = []
        drafter = self._batch.drafter
        if drafter is not None:
            lengths = answer.acceptance_lengths
            rest = result.decode_seconds - result.draft_seconds - result.verify_seconds
            rounds = [
                Round(
                    nodes=drafter.max_nodes,
                    depth=self._depth,
                    accepted=produced - 1,
                    produced=produced,
                    draft_seconds=result.draft_seconds / len(lengths),
                    verify_seconds=result.verify_seconds / len(lengths),
                    accept_seconds=rest / len(lengths),
                    cache_seconds=0.0,
                )
                for produced in lengths
            ]
        return Generation(
            answer.token_ids,
            answer.finish_reason,
            result.prefill_seconds,
            result.decode_seconds,
            tuple(rounds),
        )
