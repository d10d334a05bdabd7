"""A server with the two engines' protocols over a tiny target, streams included; it fails when told to."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eagle3.decoding.generation import Decoder, Generation
from eagle3.decoding.sampling import Sampling
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.models.target import Target


class Server(ThreadingHTTPServer):
    """Answers with `decoder`, vanilla where none is given; a stream has a piece for every round.

    `fail` requests are answered with 503 first, `hang_up` further ones by closing the connection; `most` is
    the largest number of requests that were in flight together. A stream's events come together by `merge`,
    as from a loaded server. With the usage, where it is asked for, come the drafts accepted in each round, as
    from vLLM; not where `tells_rounds` is false.

    `abort` answers are ended as SGLang does when it is told to, with status 200; prompts with the token
    `refused` get the status `refusal`; the first `starting` GETs a page that is no JSON; answers after the
    first `unheld` wait until `held` is set.
    """

    daemon_threads = True

    def __init__(self, target: Target, protocol: str, decoder: Decoder | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.protocol = protocol
        self.decoder = decoder or VanillaDecoder(target)
        self.verifications = self.accepted = self.generated = 0
        self.tells_rounds = True
        self.fail, self.hang_up, self.token_ids = 0, 0, True
        self.abort = self.starting = 0
        self.refused, self.refusal = -1, 400
        self.info: dict[str, Any] = {}  # of /server_info, beside what is always there
        self.unheld, self.held = 10**6, threading.Event()
        self.seen: list[dict[str, Any]] = []
        self.running, self.most, self.merge = 0, 0, 1
        self.decoding, self.counting = threading.Lock(), threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error here."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.starting > 0 and self.path != "/get_model_info":
            self.server.starting -= 1
            self._send(b"<html>starting</html>", 200)
        elif self.path == "/get_model_info" and self.server.protocol == "sglang":
            self._answer({"model_path": "tiny"})
        elif self.path == "/v1/models" and self.server.protocol == "openai":
            self._answer({"data": [{"id": "tiny"}]})
        elif self.path == "/server_info" and self.server.protocol == "sglang":
            states = [{"avg_spec_accept_length": 1.5}]
            self._answer({"version": "0.0.sglang", "internal_states": states, **self.server.info})
        elif self.path == "/version" and self.server.protocol == "openai":
            self._answer({"version": "0.0.vllm"})
        elif self.path == "/metrics":
            self._metrics()
        else:
            self._answer({}, 404)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.counting:
            server.running += 1
            server.most = max(server.most, server.running)
            abort = server.abort > 0
            server.abort -= abort
            fail, hang_up = server.fail > 0, server.fail == 0 and server.hang_up > 0
            server.fail -= fail
            server.hang_up -= hang_up
        self._running = True
        try:
            if fail:
                self._answer({"error": "busy"}, 503)
            elif hang_up:
                self.connection.close()
            elif server.refused in (body.get("input_ids") or body.get("prompt")):
                self._answer({"error": "this prompt is not taken"}, server.refusal)
            elif abort:
                finish = {"type": "abort", "message": "Aborted"}
                meta = {"meta_info": {"finish_reason": finish}, "output_ids": [5]}
                self._answer({**meta, "choices": [{"token_ids": [5], "finish_reason": "abort"}]})
            else:
                self._generate(body)
        finally:
            self._answered()

    def _answered(self) -> None:
        """Count the request as over: before its answer is sent, as its sender goes on when it has it."""
        with self.server.counting:
            self.server.running -= self._running
            self._running = False

    def _generate(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.counting:
            server.seen.append(body)
            held = len(server.seen) > server.unheld
        if held:
            server.held.wait(60)
        sglang = self.path == "/generate"
        values = body["sampling_params"] if sglang else body
        seed = values["sampling_seed"] if sglang else values["seed"]
        sampling = Sampling(values["temperature"], max(values["top_k"], 0), values["top_p"], seed)
        limit = values["max_new_tokens"] if sglang else values["max_tokens"]
        with server.decoding:
            generation = server.decoder.generate(
                body["input_ids"] if sglang else body["prompt"], limit, sampling
            )
            server.verifications += len(generation.rounds)
            server.accepted += sum(generation.accepted_drafts)
            server.generated += len(generation.token_ids)
        self._answered()
        if body.get("stream"):
            self._stream(generation, sglang, (body.get("stream_options") or {}).get("include_usage", False))
            return
        tokens, reason = list(generation.token_ids), generation.finish_reason
        if sglang:
            finish = {"type": reason, **({"matched": tokens[-1]} if reason == "stop" else {})}
            self._answer({"output_ids": tokens, "meta_info": {"finish_reason": finish}})
        else:
            ids = tokens if server.token_ids else None
            self._answer({"choices": [{"token_ids": ids, "finish_reason": reason}]})

    def _stream(self, generation: Generation, sglang: bool, usage: bool) -> None:
        """A piece for the prefill's token and one for every round, in the engine's own form."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        server, rounds = self.server, generation.rounds
        tokens, reason = list(generation.token_ids), generation.finish_reason
        pieces = [1, *(generation.acceptance_lengths or (1,) * (len(tokens) - 1))]
        histogram = [0] * 9
        done = sent = 0
        for number, piece in enumerate(pieces):
            done, last = done + piece, number == len(pieces) - 1
            if sglang and rounds:
                histogram[rounds[number - 1].accepted] += number > 0
            if (number + 1) % self.server.merge and not last:
                continue
            fresh, sent = tokens[sent:done], done
            if not sglang:
                self._event({"choices": [{"token_ids": fresh, "finish_reason": reason if last else None}]})
                continue
            finish = {"type": reason, **({"matched": tokens[-1]} if reason == "stop" else {})}
            meta: dict[str, Any] = {"completion_tokens": done, "finish_reason": finish if last else None}
            if rounds and last:
                meta |= {"spec_verify_ct": number, "spec_correct_drafts_histogram": list(histogram)}
            # As SGLang, which passes a list that may have grown since: the count is what holds.
            self._event({"output_ids": tokens[: done + 1], "meta_info": meta})
        if usage:
            accepted = list(generation.accepted_drafts)
            metrics = {
                "num_spec_steps": len(accepted),
                "num_accepted_draft_tokens": sum(accepted),
                "per_step_accepted": accepted,
            }
            told = {"metrics": {"speculative_decoding": metrics}} if rounds and server.tells_rounds else {}
            self._event({"choices": [], "usage": {"completion_tokens": len(tokens)}, **told})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, values: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(values)}\n\n".encode())
        self.wfile.flush()

    def _metrics(self) -> None:
        server = self.server
        names = ("vllm:spec_decode_num_drafts_total", "vllm:generation_tokens_total")
        if server.protocol == "sglang":
            names = ("sglang:spec_verify_calls_total", "sglang:generation_tokens_total")
        content = (
            f'# HELP of a counter\n{names[0]}{{model="tiny"}} {server.verifications}.0\n'
            f"{names[1]} {server.generated}.0\n"
            f"vllm:spec_decode_num_accepted_tokens_total {server.accepted}.0\n"
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{model="tiny",position="1"} 3.0\n'
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, values: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(values).encode(), status)

    def _send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def serving(target: Target, protocol: str, decoder: Decoder | None = None) -> Iterator[Server]:
    """A running server, stopped at the end."""
    server = Server(target, protocol, decoder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
