"""Answers to many prompts at once: batched decoding that refills a row as soon as its answer ends."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from eagle3.data.completion import Completion, PlannedPrompt
from eagle3.decoding.cache import KVCache
from eagle3.decoding.sampling import Sampling
from eagle3.models.target import Target, TargetOutput

# How many of the most likely tokens are looked at before the whole vocabulary is: sorting all of it is slow.
_WIDTHS = (64, 1024, 8192)


@dataclass(frozen=True)
class Request:
    """A conversation to be answered.

    segments[0] is the prompt up to the first answer; segment i is what stands between the EOS of answer
    i - 1 and answer i (the template's tokens and the next user turn).
    """

    id: str
    segments: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Answered:
    """A conversation with its answers."""

    id: str
    token_ids: tuple[int, ...]
    answer_spans: tuple[tuple[int, int], ...]  # half-open, the EOS included
    finish_reason: str  # "stop", or "length" where the last answer was cut off (later turns are not asked)
    # Where asked for, of every position but the last:
    hidden: Tensor | None  # [len(token_ids) - 1, (n + 1) H] bfloat16: captured layers, then the final state
    target_argmax: tuple[int, ...]  # the most likely next token


@dataclass
class _Row:
    """One row of the batch while it is answered."""

    request: Request
    uniform: random.Random
    token_ids: list[int]
    pending: tuple[int, ...]  # tokens not yet in the cache
    segment: int = 0
    answer_start: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


def answer(
    target: Target,
    requests: Iterable[Request],
    sampling: Sampling,
    batch_size: int,
    max_new_tokens: int,
    max_length: int,
    capture: bool,
) -> Iterator[Answered]:
    """Answer every request; yields in order of completion.

    A row's random numbers are seeded by (sampling.seed, request id), and the target's compiled kernels
    compute each row by itself, so batch size and order do not change an answer.

    Args:
        target: decodes; its cache of batch_size rows of max_length slots is allocated here.
        requests: read one by one, as rows become free.
        sampling: how tokens are chosen.
        batch_size: rows decoded together.
        max_new_tokens: limit of one answer.
        max_length: limit of a whole conversation.
        capture: also return hidden states and the target's most likely tokens.

    Raises:
        ValueError: for a request whose prompt leaves no room for an answer; for more rows than the device's
            memory has a cache for.
    """
    with torch.inference_mode():
        yield from _Batch(target, sampling, batch_size, max_new_tokens, max_length, capture).run(
            iter(requests)
        )


class _Batch:
    """The rows in flight, always the first ones of the cache."""

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        size: int,
        max_new_tokens: int,
        max_length: int,
        capture: bool,
    ) -> None:
        self._target, self._sampling, self._size = target, sampling, size
        self._max_new_tokens, self._max_length = max_new_tokens, max_length
        try:
            self._cache = target.new_cache(max_length, size)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"batch_size {size}: a KV cache of {size} rows of {max_length} tokens does not fit into the "
                "device's memory beside the model; lower batch_size or max_length in params.yaml, or let "
                "servers answer (regenerate.endpoints)"
            ) from error
        width = target.hidden_size * (len(target.capture_layers) + 1)
        self._states = torch.empty(size, max_length, width, dtype=torch.bfloat16) if capture else None
        self._argmax = torch.empty(size, max_length, dtype=torch.int32)
        self._rows: list[_Row] = []

    def run(self, requests: Iterator[Request]) -> Iterator[Answered]:
        while True:
            while len(self._rows) < self._size and (request := next(requests, None)) is not None:
                finished = self._start(request)
                if finished is not None:
                    yield finished
            if not self._rows:
                return
            yield from self._step()

    def _start(self, request: Request) -> Answered | None:
        """Take a request into the next free row and choose its first token."""
        prompt = request.segments[0]
        if not 0 < len(prompt) < self._max_length:
            raise ValueError(
                f"prompt {request.id!r} has {len(prompt)} tokens: 1 to {self._max_length - 1} fit into "
                f"max_length {self._max_length}; raise max_length or shorten the prompt"
            )
        uniform = random.Random(f"{self._sampling.seed}:{request.id}")
        self._rows.append(_Row(request, uniform, list(prompt), prompt, answer_start=len(prompt)))
        self._cache.lengths[len(self._rows) - 1] = 0
        return self._feed(len(self._rows) - 1)

    def _feed(self, index: int) -> Answered | None:
        """Run a row's pending tokens (a prompt or a next turn) by themselves and choose the next token."""
        row = self._rows[index]
        output = self._forward(index, index + 1, torch.tensor([row.pending]))
        assert output.logits is not None
        return self._accept(index, self._choose([row], output.logits[:, -1])[0])

    def _step(self) -> Iterator[Answered]:
        """One token for every row in flight."""
        output = self._forward(0, len(self._rows), torch.tensor([row.pending for row in self._rows]))
        assert output.logits is not None
        tokens = self._choose(self._rows, output.logits[:, -1])
        for index in reversed(range(len(tokens))):  # backwards: a finished row is replaced by the last one
            finished = self._accept(index, tokens[index])
            if finished is not None:
                yield finished

    def _forward(self, start: int, stop: int, input_ids: Tensor) -> TargetOutput:
        view: KVCache = self._cache.rows(start, stop)
        first = torch.tensor(view.lengths)
        positions = first[:, None] + torch.arange(input_ids.shape[1])  # [B, T]
        logits = "last" if self._states is None else "all"
        device = self._target.device
        output = self._target.forward(input_ids.to(device), positions.to(device), view, logits=logits)
        self._cache.lengths[start:stop] = view.lengths
        if self._states is not None:
            states = torch.cat((output.captured, output.final), dim=-1).to(torch.bfloat16)
            assert output.logits is not None
            rows = torch.arange(start, stop)[:, None]
            self._states[rows, positions] = states.cpu()
            self._argmax[rows, positions] = output.logits.argmax(-1).to("cpu", torch.int32)
        return output

    def _choose(self, rows: list[_Row], logits: Tensor) -> list[int]:
        """The next token of each row, logits [B, V]. One random number a token."""
        if self._sampling.greedy:
            return [int(token) for token in logits.argmax(-1)]
        return sample_rows(logits, self._sampling, [row.uniform.random() for row in rows])

    def _accept(self, index: int, token: int) -> Answered | None:
        """Append a token; at the end of an answer go on with the next turn or finish the row."""
        row = self._rows[index]
        row.token_ids.append(token)
        row.pending = (token,)
        ended = token in self._target.eos_token_ids
        room = len(row.token_ids) < self._max_length
        if not ended and room and len(row.token_ids) - row.answer_start < self._max_new_tokens:
            return None
        row.spans.append((row.answer_start, len(row.token_ids)))
        if ended and row.segment + 1 < len(row.request.segments):
            following = row.request.segments[row.segment + 1]
            if len(row.token_ids) + len(following) < self._max_length:
                row.segment += 1
                row.token_ids.extend(following)
                row.pending = (token, *following)
                row.answer_start = len(row.token_ids)
                return self._feed(index)
        return self._finish(index, "stop" if ended else "length")

    def _finish(self, index: int, reason: str) -> Answered:
        row, last = self._rows[index], len(self._rows) - 1
        hidden, argmax = None, ()
        if self._states is not None:
            hidden = self._states[index, : len(row.token_ids) - 1].clone()
            argmax = tuple(self._argmax[index, : len(row.token_ids) - 1].tolist())
        if index != last:
            used = self._cache.lengths[last]
            self._cache.copy_row(last, index)
            if self._states is not None:
                self._states[index, :used] = self._states[last, :used]
                self._argmax[index, :used] = self._argmax[last, :used]
            self._rows[index] = self._rows[last]
        self._rows.pop()
        return Answered(row.request.id, tuple(row.token_ids), tuple(row.spans), reason, hidden, argmax)


def sample_rows(logits: Tensor, sampling: Sampling, uniforms: list[float]) -> list[int]:
    """A token for each row by inverting the cumulative distribution, most likely token first.

    The distribution is that of `decoding.sampling.probabilities`. Rows are decided within their most likely
    tokens where that is possible; only those whose nucleus or random number reaches further look at more of
    the vocabulary.

    Args:
        logits: [B, V].
        sampling: temperature > 0.
        uniforms: B numbers in [0, 1).
    """
    scores = logits.float() / sampling.temperature
    vocabulary = scores.shape[1]
    candidates = min(sampling.top_k or vocabulary, vocabulary)
    among: Tensor | None = None
    if candidates < vocabulary:
        scores, among = scores.topk(candidates)
    # Not logsumexp: with several threads it adds up a single row in another order than a row of many.
    scores = scores.log_softmax(-1)
    tokens = torch.zeros(len(uniforms), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(uniforms), device=logits.device)
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    for width in (*(width for width in _WIDTHS if width < candidates), candidates):
        top, ids = scores[rows].topk(width)  # [U, W]
        cumulative = top.double().exp().cumsum(-1)
        index, decided = _invert(cumulative, numbers, sampling.top_p, exhausted=width == candidates)
        tokens[rows[decided]] = ids.gather(1, index)[decided, 0]
        rows, numbers = rows[~decided], numbers[~decided]
        if not len(rows):
            break
    return (tokens if among is None else among.gather(1, tokens[:, None])[:, 0]).tolist()


def _invert(cumulative: Tensor, numbers: Tensor, top_p: float, exhausted: bool) -> tuple[Tensor, Tensor]:
    """Where each number falls in a nucleus, [U, 1], and whether that can be said from these tokens, [U].

    Args:
        cumulative: mass of the most likely tokens, [U, W].
        numbers: in [0, 1), [U, 1].
        exhausted: there are no further tokens.
    """
    seen = cumulative[:, -1:]
    last = (cumulative < top_p).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)  # of the nucleus
    if exhausted or top_p < 1:
        mass = cumulative.gather(1, last)
        decided = torch.full_like(seen, exhausted, dtype=torch.bool) | (seen >= top_p)
    else:  # everything is the nucleus: only the number decides how far to look
        mass = torch.ones_like(seen)
        decided = numbers < seen
    index = torch.searchsorted(cumulative, numbers * mass, right=True)
    return torch.minimum(index, last), decided.flatten()


def complete(
    target: Target, planned: Sequence[PlannedPrompt], sampling: Sampling, batch_size: int, max_new_tokens: int
) -> Iterator[Completion]:
    """What the target writes after the prefixes of self-made prompts, in order of completion."""
    requests = [Request(prompt.id, (prompt.prefix_ids,)) for prompt in planned]
    longest = max(len(prompt.prefix_ids) for prompt in planned) + max_new_tokens
    answers = answer(target, requests, sampling, batch_size, max_new_tokens, longest, capture=False)
    for answered in tqdm(answers, total=len(requests), unit="prompt", desc="self-made prompts"):
        ((start, end),) = answered.answer_spans
        stopped = answered.finish_reason == "stop"
        text = target.tokenizer.decode(answered.token_ids[start : end - stopped])
        yield Completion(answered.id, text, answered.finish_reason)
