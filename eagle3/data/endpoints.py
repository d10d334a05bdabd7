"""Answers from servers: SGLang or vLLM endpoints in place of this machine, with the same rows as a result.

Prompts are sent as token ids and answers come back as token ids, so that nothing is tokenised a second time.
An endpoint that fails is left alone for a while and its requests go to the others. Only when none has
answered for long does the run end, and what was written stays.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import requests

from eagle3.data.generate import Answered, Request
from eagle3.decoding.sampling import Sampling
from eagle3.serving.protocol import OPENAI_PATH, SGLANG_PATH, openai_body, sglang_body, with_end_token

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds that a failing endpoint is left alone; doubled each time
_GIVE_UP = 600.0  # seconds without an answer from any endpoint
_TIMEOUT = (10.0, 600.0)  # seconds to connect, and to answer


class EndpointError(Exception):
    """A request that may succeed elsewhere or later."""


@dataclass
class Endpoint:
    """One server. `kind` is found out when it is first asked."""

    url: str
    kind: str = ""
    model: str = ""
    failures: int = 0
    rests_until: float = 0.0

    def complete(self, ids: Sequence[int], max_tokens: int, sampling: Sampling) -> list[int]:
        """The tokens after `ids`, an end token included.

        Raises:
            EndpointError: if the server cannot be reached, is overloaded or failing.
            ValueError: if it refuses the request, or returns no token ids.
        """
        if not self.kind:
            self._recognise()
        if self.kind == "sglang":
            answer = self._post(SGLANG_PATH, sglang_body(ids, max_tokens, sampling))
            return with_end_token(answer["output_ids"], answer["meta_info"]["finish_reason"])
        choice = self._post(OPENAI_PATH, openai_body(self.model, ids, max_tokens, sampling))["choices"][0]
        if choice.get("token_ids") is None:
            raise ValueError(
                f"{self.url} returns no token ids: tokenising its text again would not give the tokens that "
                "the target chose; use SGLang, or vLLM 0.10.2 or later"
            )
        return list(choice["token_ids"])

    def _recognise(self) -> None:
        """SGLang has an endpoint of its own; anything else has to speak OpenAI's protocol as vLLM does."""
        try:
            found = requests.get(f"{self.url}/get_model_info", timeout=_TIMEOUT)
            if found.status_code == requests.codes.ok:
                self.kind = "sglang"
                return
            models = requests.get(f"{self.url}/v1/models", timeout=_TIMEOUT)
        except requests.RequestException as error:
            raise EndpointError(f"{self.url}: {type(error).__name__}") from error
        if models.status_code != requests.codes.ok:
            raise EndpointError(f"{self.url}: status {models.status_code}")
        self.model = models.json()["data"][0]["id"]
        self.kind = "openai"

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = requests.post(self.url + path, json=body, timeout=_TIMEOUT)
        except requests.RequestException as error:
            raise EndpointError(f"{self.url}: {type(error).__name__}") from error
        if response.status_code == requests.codes.too_many_requests or response.status_code >= 500:
            raise EndpointError(f"{self.url}: status {response.status_code}")
        if response.status_code != requests.codes.ok:
            raise ValueError(f"{self.url} refuses a request: {response.text[:300]}")
        try:
            values: dict[str, Any] = response.json()
        except ValueError as error:
            raise EndpointError(f"{self.url}: an answer that is no JSON") from error
        return values


class Endpoints:
    """Several servers of one model, used in turn."""

    def __init__(self, urls: Sequence[str], say: Callable[[str], None] = print) -> None:
        self._endpoints = [Endpoint(url.rstrip("/")) for url in urls]
        self._lock = threading.Lock()
        self._turn, self._say = 0, say
        self._last_answer = time.monotonic()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let waiting requests end soon."""
        self._stopped.set()

    def complete(self, ids: Sequence[int], max_tokens: int, sampling: Sampling) -> list[int]:
        """As `Endpoint.complete`, from whichever endpoint answers.

        Raises:
            ValueError: as `Endpoint.complete`, or if no endpoint has answered for a long time.
        """
        while not self._stopped.is_set():
            endpoint, pause = self._next()
            if endpoint is None:
                if time.monotonic() - self._last_answer > _GIVE_UP:
                    raise ValueError(
                        f"no endpoint has answered for {_GIVE_UP:.0f} seconds: {', '.join(self._urls())}; "
                        "what was written stays, and the same command goes on when one is back"
                    )
                self._stopped.wait(pause)
                continue
            try:
                result = endpoint.complete(ids, max_tokens, sampling)
            except EndpointError as error:
                self._failed(endpoint, error)
                continue
            with self._lock:
                endpoint.failures, self._last_answer = 0, time.monotonic()
            return result
        raise ValueError("stopped")

    def _urls(self) -> list[str]:
        return [endpoint.url for endpoint in self._endpoints]

    def _next(self) -> tuple[Endpoint | None, float]:
        """The next endpoint that does not rest, or None and the seconds until one is back."""
        with self._lock:
            now = time.monotonic()
            for offset in range(len(self._endpoints)):
                endpoint = self._endpoints[(self._turn + offset) % len(self._endpoints)]
                if endpoint.rests_until <= now:
                    self._turn += offset + 1
                    return endpoint, 0.0
            return None, min(endpoint.rests_until for endpoint in self._endpoints) - now

    def _failed(self, endpoint: Endpoint, error: EndpointError) -> None:
        with self._lock:
            endpoint.failures += 1
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (endpoint.failures - 1))
            endpoint.rests_until = time.monotonic() + pause
        self._say(f"{error}; left alone for {pause:.0f} s")


def answer_from_endpoints(
    urls: Sequence[str],
    conversations: Iterable[Request],
    sampling: Sampling,
    concurrency: int,
    max_new_tokens: int,
    max_length: int,
    eos_token_ids: frozenset[int],
    say: Callable[[str], None] = print,
) -> Iterator[Answered]:
    """Answer every conversation, turn by turn; yields in order of completion, without hidden states.

    Args:
        urls: servers of one model, such as http://127.0.0.1:30000.
        conversations: read one by one, as requests end.
        sampling: each row's seed is made of the seed and the row's id; whether equal seeds give equal answers
            is the server's affair.
        concurrency: requests in flight at each endpoint.
        eos_token_ids: tokens that end an answer.

    Raises:
        ValueError: as `Endpoints.complete`.
    """
    endpoints = Endpoints(urls, say)
    waiting = iter(conversations)
    with ThreadPoolExecutor(concurrency * len(urls)) as pool:
        running: set[Future[Answered]] = set()
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
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
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
) -> Answered:
    """One conversation; a later turn is asked where the answer before ended by itself and there is room."""
    digest = hashlib.sha256(f"{sampling.seed}:{request.id}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big") >> 1
    ids = list(request.segments[0])
    spans: list[tuple[int, int]] = []
    for turn in range(len(request.segments)):
        room = min(max_new_tokens, max_length - len(ids))
        seeded = replace(sampling, seed=seed + turn)
        answer = _up_to_end(endpoints.complete(ids, room, seeded), eos_token_ids)
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
