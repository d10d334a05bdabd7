"""Requests in flight together: the same prompts at a level of concurrency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from eagle3.decoding.sampling import Sampling
from eagle3.serving.client import Client, Streamed
from eagle3.serving.engines import Engine


def answer_all(
    engine: Engine,
    url: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    concurrency: int,
    sampling: Sampling | None = None,
) -> tuple[list[Streamed], float]:
    """Answer every prompt, `concurrency` at a time; returns the answers in order, and the seconds of it all.

    Raises:
        ValueError, ServerError: as `Client.stream`; requests that have not begun are dropped.
    """
    sampling = sampling or Sampling()
    clients: SimpleQueue[Client] = SimpleQueue()
    for _ in range(concurrency):  # before the clock runs: making one asks the server for its model
        clients.put(Client(engine, url))

    def answer(ids: Sequence[int]) -> Streamed:
        client = clients.get()
        try:
            return client.stream(ids, max_new_tokens, sampling)
        finally:
            clients.put(client)

    with ThreadPoolExecutor(concurrency) as pool:
        began = time.perf_counter()
        try:
            answers = list(pool.map(answer, prompts))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return answers, time.perf_counter() - began
