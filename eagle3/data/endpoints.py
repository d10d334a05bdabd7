"""Answers from servers: SGLang or vLLM endpoints in place of this machine, with the same rows as a result.

Prompts are sent as token ids and answers come back as token ids, so that nothing is tokenised a second time.
An endpoint that fails is left alone for a while and its requests go to the others. Only when none has
answered for long does the run end, and what was written stays.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.data.endpoint import AnswerAborted, Connections, Endpoint, EndpointError, RowRefused
from eagle3.data.generate import Answered, Request
from eagle3.decoding.sampling import Sampling
from eagle3.serving.protocol import names_model

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds that a failing endpoint is left alone; doubled each time
_GIVE_UP = 600.0  # seconds without an answer from any endpoint
_LONGEST_DOUBLING = 16  # of a pause, beyond which none is longer
_ABORTS = 5  # of one answer, after which its prompt counts as refused
_ALL_REFUSED = 8  # first prompts refused and none answered: it is not the prompts


@dataclass(frozen=True)
class Refused:
    """A prompt that no endpoint takes."""

    id: str
    reason: str


class Endpoints:
    """Several servers of one model, used in turn."""

    def __init__(
        self, urls: Sequence[str], target: Path | None = None, say: Callable[[str], None] = print
    ) -> None:
        """
        Args:
            target: the folder of the model that they should serve.
        """
        self._connections = Connections()
        # One given twice is one: what it refuses, all have refused.
        distinct = dict.fromkeys(url.rstrip("/") for url in urls)
        self._endpoints = [Endpoint(url, self._connections) for url in distinct]
        self._lock = threading.Lock()
        self._turn, self._target, self._say = 0, target, say
        self._last_answer = time.monotonic()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the requests under way, and let waiting ones end soon."""
        self._stopped.set()
        self._connections.cut()

    def complete(self, ids: Sequence[int], max_tokens: int, sampling: Sampling) -> list[int]:
        """As `Endpoint.complete`, from whichever endpoint answers.

        Raises:
            RowRefused: if no endpoint that answers takes the prompt, or its answers are ended again and
                again.
            ValueError: as `Endpoint.complete`, or if no endpoint has answered for a long time.
        """
        refused_by: dict[str, RowRefused] = {}
        aborted = 0
        while not self._stopped.is_set():
            endpoint, pause = self._next(refused_by)
            if endpoint is None:
                if time.monotonic() - self._last_answer > _GIVE_UP:
                    if refused_by:  # by all that answer
                        raise next(iter(refused_by.values()))
                    raise ValueError(
                        f"no endpoint has answered for {_GIVE_UP:.0f} seconds: {', '.join(self._urls())}; "
                        "what was written stays, and the same command goes on when one is back"
                    )
                self._stopped.wait(pause)
                continue
            try:
                result = endpoint.complete(ids, max_tokens, sampling)
            except RowRefused as error:
                refused_by[endpoint.url] = error
                if len(refused_by) == len(self._endpoints):
                    raise
                continue
            except EndpointError as error:
                aborted += isinstance(error, AnswerAborted)
                if aborted == _ABORTS:
                    raise RowRefused(f"ended {_ABORTS} times: {error}") from error
                self._failed(endpoint, error)
                continue
            self._answered(endpoint)
            return result
        raise ValueError("stopped")

    def _urls(self) -> list[str]:
        return [endpoint.url for endpoint in self._endpoints]

    def _next(self, without: Collection[str]) -> tuple[Endpoint | None, float]:
        """The next endpoint that does not rest, or None and the seconds until one is back."""
        with self._lock:
            now = time.monotonic()
            for offset in range(len(self._endpoints)):
                endpoint = self._endpoints[(self._turn + offset) % len(self._endpoints)]
                if endpoint.rests_until <= now and endpoint.url not in without:
                    self._turn += offset + 1
                    return endpoint, 0.0
            resting = [each.rests_until for each in self._endpoints if each.url not in without]
            return None, max(0.0, min(resting) - now)

    def _answered(self, endpoint: Endpoint) -> None:
        with self._lock:
            endpoint.failures, self._last_answer = 0, time.monotonic()
            checked, endpoint.checked = endpoint.checked, True
        if checked or self._target is None or not endpoint.model:
            return
        if not names_model(endpoint.model, self._target):
            self._say(
                f"{endpoint.url} serves {endpoint.model}: check that this is the target in {self._target}; "
                "answers of another model would train a draft for that one"
            )

    def _failed(self, endpoint: Endpoint, error: EndpointError) -> None:
        """Leave an endpoint alone; requests that were under way when it failed are one failure together."""
        with self._lock:
            now = time.monotonic()
            if endpoint.rests_until > now:
                return
            doublings = min(endpoint.failures, _LONGEST_DOUBLING)
            endpoint.failures += 1
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**doublings)
            endpoint.rests_until = now + pause
        self._say(f"{error}; left alone for {pause:.0f} s")


def answer_from_endpoints(
    urls: Sequence[str],
    conversations: Iterable[Request],
    sampling: Sampling,
    concurrency: int,
    max_new_tokens: int,
    max_length: int,
    eos_token_ids: frozenset[int],
    target: Path | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Answered | Refused]:
    """Answer every conversation, turn by turn; yields in order of completion, without hidden states.

    Closing the iterator, as an interrupt does, ends the requests that are under way.

    Args:
        urls: servers of one model, such as http://127.0.0.1:30000.
        conversations: read one by one, as requests end.
        sampling: each row's seed is made of the seed and the row's id; whether equal seeds give equal answers
            is the server's affair.
        concurrency: requests in flight at each endpoint.
        eos_token_ids: tokens that end an answer.
        target: the folder of the model that the endpoints should serve; another name is warned of.

    Raises:
        ValueError: as `Endpoints.complete`, but for a prompt that is refused beside others that are answered.
    """
    endpoints = Endpoints(urls, target, say)
    waiting = iter(conversations)
    answered, refused = 0, list[Refused]()  # refused before the first answer
    with ThreadPoolExecutor(concurrency * len(urls)) as pool:
        running: set[Future[Answered | Refused]] = set()
        try:
            while True:
                while len(running) < concurrency * len(urls):
                    request = next(waiting, None)
                    if request is None:
                        break
                    running.add(
                        pool.submit(
                            _converse, endpoints, request, sampling, max_new_tokens, max_length, eos_token_ids
                        )
                    )
                if not running:
                    yield from refused
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    answered += isinstance(result, Answered)
                    if isinstance(result, Refused) and not answered:
                        refused.append(result)
                        if len(refused) == _ALL_REFUSED:
                            raise ValueError(
                                f"the first {_ALL_REFUSED} prompts were refused, and none answered; the last "
                                f"with: {result.reason}"
                            )
                        continue
                    yield result
        finally:
            endpoints.stop()
            for future in running:
                future.cancel()


def _converse(
    endpoints: Endpoints,
    request: Request,
    sampling: Sampling,
    max_new_tokens: int,
    max_length: int,
    eos_token_ids: frozenset[int],
) -> Answered | Refused:
    """One conversation; a later turn is asked where the answer before ended by itself and there is room."""
    digest = hashlib.sha256(f"{sampling.seed}:{request.id}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big") >> 1
    ids = list(request.segments[0])
    spans: list[tuple[int, int]] = []
    for turn in range(len(request.segments)):
        room = min(max_new_tokens, max_length - len(ids))
        seeded = replace(sampling, seed=seed + turn)
        try:
            answer = _up_to_end(endpoints.complete(ids, room, seeded), eos_token_ids)
        except RowRefused as error:
            return Refused(request.id, str(error))
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
        ended = bool(answer) and answer[-1] in eos_token_ids
        following = request.segments[turn + 1] if turn + 1 < len(request.segments) else None
        if not ended or following is None or len(ids) + len(following) >= max_length:
            return Answered(request.id, tuple(ids), tuple(spans), "stop" if ended else "length", None, ())
        ids += following
    raise AssertionError("a conversation ends with its last turn")


def _up_to_end(answer: Sequence[int], eos_token_ids: frozenset[int]) -> list[int]:
    """The answer up to and with its first end token; servers may know fewer of them than the template."""
    for index, token in enumerate(answer):
        if token in eos_token_ids:
            return list(answer[: index + 1])
    return list(answer)
