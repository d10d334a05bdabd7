"""A server with the two protocols that regeneration speaks, over a tiny target; it fails when told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target


class Server(ThreadingHTTPServer):
    """Answers by vanilla decoding.

    `fail` requests are answered with 503 first, `hang_up` further ones by closing the connection; `most` is
    the largest number of requests that were in flight together.
    """

    daemon_threads = True

    def __init__(self, target: Target, protocol: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.protocol = target, protocol
        self.fail, self.hang_up, self.token_ids = 0, 0, True
        self.seen: list[dict[str, Any]] = []
        self.running, self.most = 0, 0
        self.decoding, self.counting = threading.Lock(), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/get_model_info" and self.server.protocol == "sglang":
            self._answer({"model_path": "tiny"})
        elif self.path == "/v1/models" and self.server.protocol == "openai":
            self._answer({"data": [{"id": "tiny"}]})
        else:
            self._answer({}, 404)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.counting:
            server.running += 1
            server.most = max(server.most, server.running)
            fail, hang_up = server.fail > 0, server.fail == 0 and server.hang_up > 0
            server.fail -= fail
            server.hang_up -= hang_up
        try:
            if fail:
                self._answer({"error": "busy"}, 503)
            elif hang_up:
                self.connection.close()
            else:
                self._generate(body)
        finally:
            with server.counting:
                server.running -= 1

    def _generate(self, body: dict[str, Any]) -> None:
        server = self.server
        server.seen.append(body)
        sglang = self.path == "/generate"
        values = body["sampling_params"] if sglang else body
        seed = values["sampling_seed"] if sglang else values["seed"]
        sampling = Sampling(values["temperature"], max(values["top_k"], 0), values["top_p"], seed)
        limit = values["max_new_tokens"] if sglang else values["max_tokens"]
        with server.decoding:
            generation = VanillaDecoder(server.target).generate(
                body["input_ids"] if sglang else body["prompt"], limit, sampling
            )
        tokens, reason = list(generation.token_ids), generation.finish_reason
        if sglang:
            finish = {"type": reason, **({"matched": tokens[-1]} if reason == "stop" else {})}
            self._answer({"output_ids": tokens, "meta_info": {"finish_reason": finish}})
        else:
            ids = tokens if server.token_ids else None
            self._answer({"choices": [{"token_ids": ids, "finish_reason": reason}]})

    def _answer(self, values: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def serving(target: Target, protocol: str) -> Iterator[Server]:
    """A running server, stopped at the end."""
    server = Server(target, protocol)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
