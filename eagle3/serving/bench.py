"""Decoders that are servers: rows of an evaluation or trials of a sweep, decoded by SGLang or vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3 import paths
from eagle3.config import HeadMethod, MethodSettings, Settings
from eagle3.decoding.generation import Decoder, Generation, Round, rounds_of_lengths
from eagle3.decoding.sampling import Sampling
from eagle3.measure.bench import Bench
from eagle3.models.formats import read_family
from eagle3.models.target import Target
from eagle3.provenance import hash_object
from eagle3.serving.client import Client
from eagle3.serving.engines import Engine, Speculation
from eagle3.serving.metrics import rounds_of
from eagle3.serving.servers import WHOLE_PREFILL, Servers

if TYPE_CHECKING:
    from eagle3.tuning.space import Configuration


class ServedDecoder:
    """A server as a decoder.

    The times of a round's parts are inside the server: the whole round is between the parts. For what is
    known of the rounds see `metrics.rounds_of`.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        speculation: Speculation | None,
        explaining: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            explaining: entered around every request; adds to a ServerError what became of the server.
        """
        self.name = name
        self._client, self._speculation, self._explaining = client, speculation, explaining

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """See `Decoder.generate`; the prefill ends with the first token's arrival."""
        with self._explaining():
            answer = self._client.stream(prompt_ids, max_new_tokens, sampling)
        tree = self._speculation
        rounds: tuple[Round, ...] = ()
        if tree is not None:
            known = rounds_of(answer, len(prompt_ids), tree.num_steps)
            lengths = rounds_of_lengths(known.produced, tree.num_draft_tokens, tree.num_steps)
            rounds = tuple(
                replace(each, accepted=accepted)
                for each, accepted in zip(lengths, known.accepted, strict=True)
            )
        return Generation(
            answer.token_ids,
            answer.finish_reason,
            answer.time_to_first_token,
            answer.decode_seconds,
            rounds,
        )


class ServedBench(Bench):
    """As `Bench`, with every decoder a server; the native target still checks the outputs."""

    @classmethod
    def start(
        cls,
        settings: Settings,
        engine: Engine,
        target: Target,
        stack: ExitStack,
        together: Sequence[str] | None = None,
    ) -> ServedBench:
        """A bench whose servers end with the stack; they start when a decoder is asked for.

        Args:
            together: the decoders that will be compared; None for a sweep, whose held-out comparison has
                vanilla, the finalists and a default tree.

        Raises:
            ValueError: if their servers do not fit the GPU together.
        """
        servers = Servers(settings, engine)
        if together is None:
            finalists = settings.sweep.held_out.finalists
            together = ["vanilla", "a default tree", *(f"finalist {number}" for number in range(finalists))]
        settle(target)
        servers.check_memory(together)
        own = settings.serving.engine(engine)
        serving = {
            "options": {**own.options, **WHOLE_PREFILL[engine]},
            "environment": hash_object(own.environment),  # may hold secrets
            "urls": dict(own.urls),
        }
        return cls(target, paths.DRAFTS, engine, stack.enter_context(servers), serving)

    def __init__(
        self, target: Target, drafts: Path, engine: Engine, servers: Servers, serving: dict[str, Any]
    ) -> None:
        """
        Args:
            serving: how the servers are started or found, as an evaluation records it.
        """
        super().__init__(target, drafts, target.dtype)
        self._engine, self._servers, self._serving = engine, servers, serving
        self._version = ""

    def describe(self) -> dict[str, Any]:
        """See `Bench.describe`; the version is known once a server runs."""
        return {"engine": self._engine, "version": self._version, "serving": self._serving}

    def vanilla(self, batch_size: int = 1) -> Decoder:
        """The baseline, served without a draft, and never through torch.compile: a row that is compiles the
        target too. It opens a comparison: the servers of the one before are ended.
        """
        assert batch_size == 1, "settings refuse batches of a served sweep"
        self._servers.stop_all()
        return self._served("vanilla", None, compiled=False)

    def decoder(self, method: MethodSettings) -> Decoder:
        """The decoder of one row.

        Raises:
            ValueError: for a method that is no head with a dynamic tree or chain.
        """
        if not isinstance(method, HeadMethod):
            raise ValueError(
                f"method {method.name!r} has drafter {method.drafter!r}: servers decode with drafter 'head' "
                "alone; take it out, or set evaluate.engine to native"
            )
        speculation = speculation_of(self._folder / method.draft, **method.tree.model_dump())
        return self._served(method.name, speculation, compiled=method.backend == "compile")

    def tuned(self, configuration: Configuration, name: str, batch_size: int = 1) -> Decoder:
        """The decoder of a configuration that a sweep tries; the server of the last trial is ended."""
        assert batch_size == 1, "settings refuse batches of a served sweep"
        speculation = speculation_of(self._folder / configuration.draft, **configuration.tree)
        return self._served(name, speculation, compiled=configuration.backend == "compile")

    def _served(self, name: str, speculation: Speculation | None, compiled: bool) -> Decoder:
        # On a GPU an engine that is kept from compiling is no baseline: vLLM loses its CUDA graphs with it.
        how = None if self._servers.on_gpu and not compiled else compiled
        url = self._servers.url(name, speculation, how, WHOLE_PREFILL[self._engine])
        client = Client(self._engine, url)
        with self._servers.explaining(name):
            self._version = self._version or client.version()
        return ServedDecoder(name, client, speculation, partial(self._servers.explaining, name))


@torch.inference_mode()
def settle(target: Target) -> None:
    """One forward, which lays the weights out for decoding: before servers take what memory is free."""
    start = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    target.forward(start, start, target.new_cache(1), logits="last")


def speculation_of(folder: Path, num_steps: int, topk: int, num_draft_tokens: int) -> Speculation:
    """A draft's folder and tree, with the family that its config.json tells, or else its tensors.

    Raises:
        ValueError: if there is no draft.
    """
    return Speculation(read_family(folder), folder, num_steps, topk, num_draft_tokens)
