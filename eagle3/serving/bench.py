"""Decoders that are servers: rows of an evaluation or trials of a sweep, decoded by SGLang or vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eagle3 import paths
from eagle3.config import HeadMethod, MethodSettings, Settings
from eagle3.decoding.generation import Decoder, Generation, Round, rounds_of_lengths
from eagle3.decoding.sampling import Sampling
from eagle3.measure.bench import Bench
from eagle3.models.formats import read_draft_files
from eagle3.models.target import Target
from eagle3.serving.client import Client
from eagle3.serving.engines import Engine, Option, Service, Speculation, command, translate
from eagle3.serving.server import free_port, launch

if TYPE_CHECKING:
    from eagle3.tuning.space import Configuration


class ServedDecoder:
    """A server as a decoder.

    The times of a round's parts are inside the server: the whole round is between the parts. Drafts accepted
    beyond the end of an answer are not seen.
    """

    def __init__(self, name: str, client: Client, speculation: Speculation | None) -> None:
        self.name = name
        self._client, self._speculation = client, speculation

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """See `Decoder.generate`; the prefill ends with the first token's arrival."""
        answer = self._client.stream(prompt_ids, max_new_tokens, sampling)
        tree = self._speculation
        rounds: tuple[Round, ...] = ()
        if tree is not None:
            rounds = rounds_of_lengths(answer.produced, tree.num_draft_tokens, tree.num_steps)
        return Generation(
            answer.token_ids,
            answer.finish_reason,
            answer.time_to_first_token,
            answer.decode_seconds,
            rounds,
        )


class Servers(AbstractContextManager["Servers"]):
    """Servers of one engine by name, started when first asked for and ended together."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings, self._engine = settings.serving, engine
        self._dtype, self._logs = settings.evaluate.dtype, paths.RUNS / "serving"
        self._own = self._settings.engine(engine)
        self._options = translate(engine, self._own.options, print)
        self._running: dict[str, ExitStack] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:  # ends all of them, also where one fails to end
            for name in list(self._running):
                stack.callback(self.stop, name)

    def url(
        self,
        name: str,
        speculation: Speculation | None,
        compiled: bool = False,
        options: Mapping[str, Option] | None = None,
    ) -> str:
        """The URL of a server that serves this, started now unless params.yaml names one that runs.

        Args:
            options: beside those of params.yaml.

        Raises:
            ValueError, ServerError: as `launch` and `command`.
        """
        if name in self._own.urls:
            return self._own.urls[name]
        self.stop(name)  # of an earlier trial
        service = Service(paths.TARGET, self._dtype, speculation, compiled)
        taken = len(self._running)  # several servers at once take the ports that follow
        port = self._settings.port + taken if self._settings.port else free_port(self._settings.host)
        words = command(
            self._engine,
            Path(self._own.python),
            service,
            self._settings.host,
            port,
            {**self._options, **(options or {})},
        )
        print(f"starting {self._engine} for {name} on port {port}")
        stack = ExitStack()
        url = stack.enter_context(
            launch(
                words,
                self._settings.host,
                port,
                self._logs / f"{self._engine}-{name.replace('/', '-')}.log",  # a tree is called 2/3/6
                environment=self._own.environment,
                timeout=self._settings.start_timeout,
            )
        )
        self._running[name] = stack
        return url

    def stop(self, name: str) -> None:
        """End the server of that name, where one was started."""
        stack = self._running.pop(name, None)
        if stack is not None:
            stack.close()


class ServedBench(Bench):
    """As `Bench`, with every decoder a server; the native target still checks the outputs."""

    @classmethod
    def start(cls, settings: Settings, engine: Engine, target: Target, stack: ExitStack) -> ServedBench:
        """A bench whose servers end with the stack; they start when a decoder is asked for."""
        return cls(target, paths.DRAFTS, engine, stack.enter_context(Servers(settings, engine)))

    def __init__(self, target: Target, drafts: Path, engine: Engine, servers: Servers) -> None:
        super().__init__(target, drafts, target.dtype)
        self._engine, self._servers = engine, servers
        self._version = ""

    def describe(self) -> dict[str, Any]:
        """See `Bench.describe`; the version is known once a server runs."""
        return {"engine": self._engine, "version": self._version}

    def vanilla(self, batch_size: int = 1) -> Decoder:
        """The baseline, served without a draft, and never through torch.compile: a row that is compiles the
        target too.
        """
        assert batch_size == 1, "settings refuse batches of a served sweep"
        return self._served("vanilla", None)

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
        return self._served(method.name, speculation, method.backend == "compile")

    def tuned(self, configuration: Configuration, name: str, batch_size: int = 1) -> Decoder:
        """The decoder of a configuration that a sweep tries; the server of the last trial is ended."""
        assert batch_size == 1, "settings refuse batches of a served sweep"
        speculation = speculation_of(self._folder / configuration.draft, **configuration.tree)
        return self._served(name, speculation, configuration.backend == "compile")

    def _served(self, name: str, speculation: Speculation | None, compiled: bool = False) -> Decoder:
        client = Client(self._engine, self._servers.url(name, speculation, compiled))
        self._version = self._version or client.version()
        return ServedDecoder(name, client, speculation)


def speculation_of(folder: Path, num_steps: int, topk: int, num_draft_tokens: int) -> Speculation:
    """A draft's folder and tree, with the family that its files tell."""
    family = read_draft_files(folder).family
    return Speculation(family, folder, num_steps, topk, num_draft_tokens)
