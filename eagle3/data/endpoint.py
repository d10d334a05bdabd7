"""One server that answers prompts: SGLang's own protocol, or OpenAI's as vLLM extends it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from eagle3.decoding.sampling import Sampling
from eagle3.serving.protocol import OPENAI_PATH, SGLANG_PATH, openai_body, sglang_body, with_end_token

_TIMEOUT = (10.0, 600.0)  # seconds to connect, and to answer
# What a server says of a prompt: unlike others of these, they can differ from one row to the next.
_OF_THE_ROW = (
    requests.codes.bad_request,
    requests.codes.request_entity_too_large,
    requests.codes.unprocessable_entity,
)
_PASSING = (requests.codes.request_timeout, requests.codes.too_many_requests)
_REMEDIES = {
    requests.codes.unauthorized: "it asks for a key, and none is sent: start it without one",
    requests.codes.forbidden: "it does not let this machine ask",
    requests.codes.not_found: "nothing is there: regenerate.endpoints takes http://host:port, without a path",
}


class EndpointError(Exception):
    """A request that may succeed elsewhere or later."""


class AnswerAborted(EndpointError):
    """An answer that the server ended before it was one."""


class RowRefused(ValueError):
    """A prompt that a server does not take; others may go on."""


class Connections:
    """The connections of requests that are under way, which can be cut from another thread."""

    def __init__(self) -> None:
        self._lock, self._open, self._cut = threading.Lock(), set[socket.socket](), False
        self._pools = self._pool_classes()

    def session(self) -> requests.Session:
        """A session for one request, whose connection is known here."""
        session, adapter = requests.Session(), HTTPAdapter()
        adapter.poolmanager.pool_classes_by_scheme = self._pools
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        return session

    def cut(self) -> None:
        """End what is under way, and what begins later, as if the server had hung up."""
        with self._lock:
            self._cut = True
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            if self._cut:
                raise ConnectionAbortedError("the requests are ended")
            self._open = {each for each in self._open if each.fileno() >= 0} | {connection}

    def _pool_classes(self) -> dict[str, type[HTTPConnectionPool]]:
        opened = self._opened

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        return {"http": PlainPool, "https": SecurePool}


@dataclass
class Endpoint:
    """One server. `kind` and `model` are found out when it is first asked."""

    url: str
    connections: Connections = field(default_factory=Connections)
    kind: str = ""
    name: str = ""  # of the model in OpenAI's protocol
    model: str = ""  # where the model came from, as the server tells it
    failures: int = 0
    rests_until: float = 0.0
    checked: bool = False  # whether the model was compared with the target

    def complete(self, ids: Sequence[int], max_tokens: int, sampling: Sampling) -> list[int]:
        """The tokens after `ids`, an end token included.

        Raises:
            EndpointError: if the server cannot be reached, is overloaded or failing, or ends the answer.
            RowRefused: if it does not take this prompt.
            ValueError: if it takes none, or returns no token ids.
        """
        if not self.kind:
            self._recognise()
        if self.kind == "sglang":
            answer = self._post(SGLANG_PATH, sglang_body(ids, max_tokens, sampling))
            finish = answer["meta_info"]["finish_reason"] or {}
            self._check_finish(finish.get("type"), str(finish.get("message") or ""))
            return with_end_token(answer["output_ids"], finish)
        choice = self._post(OPENAI_PATH, openai_body(self.name, ids, max_tokens, sampling))["choices"][0]
        self._check_finish(choice.get("finish_reason"), "")
        if choice.get("token_ids") is None:
            raise ValueError(
                f"{self.url} returns no token ids: tokenising its text again would not give the tokens that "
                "the target chose; use SGLang, or vLLM 0.10.2 or later"
            )
        return list(choice["token_ids"])

    def _check_finish(self, reason: str | None, message: str) -> None:
        """An answer that did not end by itself or at the limit is none, whatever the status says."""
        if reason not in ("stop", "length"):
            raise AnswerAborted(f"{self.url}: an answer ended with {reason or 'no reason'} {message[:200]}")

    def _recognise(self) -> None:
        """SGLang has an endpoint of its own; anything else has to speak OpenAI's protocol as vLLM does."""
        found = self._ask("GET", "/get_model_info")
        if found.status_code == requests.codes.ok:
            self.model = str(self._values(found).get("model_path") or "")
            self.kind = "sglang"
            return
        models = self._ask("GET", "/v1/models")
        self._check_status(models)
        try:
            served = self._values(models)["data"][0]
            self.name, self.model = str(served["id"]), str(served.get("root") or served["id"])
        except (KeyError, IndexError, TypeError) as error:  # a proxy's answer while the server starts
            raise EndpointError(f"{self.url}: /v1/models lists no model") from error
        self.kind = "openai"

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._ask("POST", path, body)
        self._check_status(response)
        return self._values(response)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        try:
            with self.connections.session() as session:
                return session.request(method, self.url + path, json=body, timeout=_TIMEOUT)
        except requests.RequestException as error:
            raise EndpointError(f"{self.url}: {type(error).__name__}") from error

    def _check_status(self, response: requests.Response) -> None:
        status = response.status_code
        if status in _PASSING or status >= requests.codes.server_error:
            raise EndpointError(f"{self.url}: status {status}")
        if status in _OF_THE_ROW:
            raise RowRefused(f"{self.url} refuses a prompt: status {status}: {response.text[:300]}")
        if status != requests.codes.ok:
            remedy = _REMEDIES.get(status, "it takes no requests like this project's")
            raise ValueError(f"{self.url}: status {status}: {remedy}; it says {response.text[:300]!r}")

    def _values(self, response: requests.Response) -> dict[str, Any]:
        try:
            values = response.json()
        except ValueError as error:
            raise EndpointError(f"{self.url}: an answer that is no JSON") from error
        if not isinstance(values, dict):
            raise EndpointError(f"{self.url}: an answer that is no JSON object")
        return values
