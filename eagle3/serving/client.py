"""A client that streams token ids and notes when each piece of an answer came."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor

from eagle3.decoding.sampling import Sampling
from eagle3.serving.engines import Engine
from eagle3.serving.protocol import OPENAI_PATH, SGLANG_PATH, openai_body, sglang_body, with_end_token
from eagle3.serving.server import ServerError

_TIMEOUT = (10.0, 600.0)  # seconds to connect, and between two pieces of an answer
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_POSITION = re.compile(r'position="(\d+)"')  # the label of vLLM's counter by draft position


@dataclass(frozen=True)
class Streamed:
    """One streamed answer.

    The engines send what a step of theirs gave as one piece: the prefill's token first, then the tokens of
    each verification (or one token a step, without a draft). Pieces that arrive together count as one.
    """

    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    pieces: tuple[int, ...]  # tokens of each piece
    arrivals: tuple[float, ...]  # seconds from the request to each piece
    meta: dict[str, Any]  # SGLang's meta_info of the whole answer, or vLLM's speculative_decoding metrics

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.arrivals[0]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.arrivals[-1] - self.arrivals[0]

    @property
    def produced(self) -> tuple[int, ...]:
        """Tokens of each piece after the prefill's token, which may have come together with the next ones."""
        first = self.pieces[0] - 1
        return (first, *self.pieces[1:]) if first else self.pieces[1:]


class Client:
    """One server."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine, self.url = engine, url.rstrip("/")
        self._session = requests.Session()
        # A proxy of the environment knows nothing of this machine's ports.
        self._session.trust_env = urlsplit(url).hostname not in _THIS_MACHINE
        served = {} if engine == "sglang" else self._get("/v1/models").json()["data"][0]
        self._model, self._root = served.get("id", ""), served.get("root") or ""

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Streamed:
        """Answer a prompt of token ids.

        Raises:
            ValueError: if the server refuses the request.
            ServerError: if it breaks off, or sends no token ids.
        """
        sglang = self.engine == "sglang"
        if sglang:
            path, body = SGLANG_PATH, sglang_body(ids, max_new_tokens, sampling)
        else:
            path, body = OPENAI_PATH, openai_body(self._model, ids, max_new_tokens, sampling)
            body["stream_options"] = {"include_usage": True}  # the metrics come with the usage
        tokens: list[int] = []
        pieces: list[int] = []
        arrivals: list[float] = []
        reason, meta = "", {}
        began = time.perf_counter()
        for event in self._events(path, {**body, "stream": True}):
            now = time.perf_counter() - began
            fresh, ended = [], ""
            if sglang:
                # SGLang repeats the whole answer in every event; its number of tokens is the event's own.
                meta = event["meta_info"]
                finish = meta["finish_reason"] or {}
                answer = with_end_token(event["output_ids"][: meta["completion_tokens"]], finish)
                fresh, ended = answer[len(tokens) :], finish.get("type", "")
            elif event["choices"]:
                choice = event["choices"][0]
                fresh, ended = choice["token_ids"] or [], choice["finish_reason"] or ""
            else:  # the usage, which comes last
                meta = (event.get("metrics") or {}).get("speculative_decoding") or {}
            tokens += fresh
            reason = ended or reason
            if fresh:
                pieces.append(len(fresh))
                arrivals.append(now)
        if not tokens or reason not in ("stop", "length"):
            raise ServerError(
                f"{self.url} broke an answer off after {len(tokens)} tokens ({reason or 'no reason'})"
            )
        return Streamed(tuple(tokens), reason, tuple(pieces), tuple(arrivals), dict(meta))

    def hidden_states(self, ids: Sequence[int]) -> Tensor:
        """What SGLang captured of a prompt for its EAGLE-3 draft, side by side, [T, n * H].

        The server needs --enable-return-hidden-states, and --disable-radix-cache: of a prefix that it has
        cached it returns nothing.

        Raises:
            ServerError: if the answer has none.
        """
        body = {**sglang_body(ids, 1, Sampling()), "return_hidden_states": True}
        states = self._post(SGLANG_PATH, body).json()["meta_info"].get("hidden_states")
        if not states:
            raise ServerError(
                f"{self.url} returns no hidden states: start it with --enable-return-hidden-states"
            )
        return torch.tensor(states[0], dtype=torch.float32)

    def version(self) -> str:
        """The engine's own version."""
        if self.engine == "sglang":
            return str(self.server_info()["version"])
        return str(self._get("/version").json()["version"])

    def model_path(self) -> str:
        """The path or name of the model that is served; empty where the server does not tell."""
        if self.engine == "sglang":
            return str(self.server_info().get("model_path") or "")
        return str(self._root)

    def server_info(self) -> dict[str, Any]:
        """SGLang's /server_info: its settings and averages."""
        values: dict[str, Any] = self._get("/server_info").json()
        return values

    def prometheus(self) -> dict[str, float]:
        """/metrics as name -> sum over all label sets; of vLLM's per-position counter, name[position]."""
        totals: dict[str, float] = {}
        try:
            text = self._get("/metrics").text
        except ServerError as error:
            raise ServerError(
                f"{error}; SGLang has its counters there when started with --enable-metrics"
            ) from None
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            name, _, labels = name.partition("{")
            if position := _POSITION.search(labels):
                name += f"[{position[1]}]"
            totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events, decoded."""
        with self._post(path, body, stream=True) as response:
            try:
                for line in response.iter_lines():
                    if not line.startswith(b"data:"):
                        continue
                    data = line[len(b"data:") :].strip()
                    if data == b"[DONE]":
                        continue  # to the end of the response, so that the connection can be used again
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(f"{self.url}: {event['error']}")
                    yield event
            except requests.RequestException as error:
                raise ServerError(f"{self.url} broke an answer off: {type(error).__name__}") from error

    def _post(self, path: str, body: dict[str, Any], stream: bool = False) -> requests.Response:
        try:
            response = self._session.post(self.url + path, json=body, timeout=_TIMEOUT, stream=stream)
        except requests.RequestException as error:
            raise ServerError(f"{self.url} does not answer: {type(error).__name__}") from error
        if response.status_code >= requests.codes.server_error:
            raise ServerError(f"{self.url}: status {response.status_code}: {response.text[:300]}")
        if response.status_code != requests.codes.ok:
            raise ValueError(f"{self.url} refuses a request: {response.text[:300]}")
        return response

    def _get(self, path: str) -> requests.Response:
        try:
            response = self._session.get(self.url + path, timeout=_TIMEOUT)
            response.raise_for_status()
        except requests.RequestException as error:
            raise ServerError(f"{self.url}{path} does not answer: {error}") from error
        return response
