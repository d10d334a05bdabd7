"""The servers that a comparison needs: started when first asked for, never left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from eagle3 import paths
from eagle3.config import Settings
from eagle3.serving.client import Client
from eagle3.serving.engines import Engine, Option, Service, Speculation, command, translate
from eagle3.serving.identity import check_service
from eagle3.serving.server import RunningServer, ServerError, ended_by_signals, free_port, launch

# What installs an engine, and its option for the share of a GPU's memory that a server takes.
_PACKAGES: dict[Engine, str] = {"sglang": "sglang==0.5.23", "vllm": "vllm==0.32.0"}
_MEMORY: dict[Engine, str] = {"sglang": "mem-fraction-static", "vllm": "gpu-memory-utilization"}
_VLLM_SHARE = 0.92  # that vLLM takes where it is not told
# What keeps a server from answering a prompt out of its prefix cache: every time is then of a whole prefill.
WHOLE_PREFILL: dict[Engine, dict[str, Option]] = {
    "sglang": {"disable-radix-cache": True},
    "vllm": {"enable-prefix-caching": False},
}
_MOST_MEMORY = 0.95  # of a GPU, that servers may take together: their graphs need some beside
# Of SGLang's attention kernels on a GPU, those that take float32: the ones it chooses itself take 16 bits.
_FLOAT32_ATTENTION: dict[str, Option] = {"attention-backend": "triton"}
_TRIAL = "trial"  # what a sweep calls the server of the moment


@dataclass(frozen=True)
class _Started:
    server: RunningServer
    port: int
    stack: ExitStack  # ends it


class Servers(AbstractContextManager["Servers"]):
    """Servers of one engine by name, ended together, by a signal too; to be entered in the main thread."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        """
        Raises:
            ValueError: if serving.<engine>.urls names what nothing is called.
        """
        self._settings, self._engine = settings.serving, engine
        self._dtype, self._logs = settings.evaluate.dtype, paths.RUNS / "serving"
        self._own = self._settings.engine(engine)
        self._options = translate(engine, self._own.options, print)
        self._started: dict[str, _Started] = {}
        self._signals = ExitStack()
        served = [*self._settings.experiments, *settings.evaluate.methods]
        known = dict.fromkeys(["vanilla", *(item.name for item in served), "tuned"])
        for name in self._own.urls:
            if name == _TRIAL or name not in known:
                why = "every trial has another tree" if name == _TRIAL else "nothing is served by that name"
                raise ValueError(f"serving.{engine}.urls.{name}: {why}; it can name {', '.join(known)}")

    def __enter__(self) -> Servers:
        self._signals.enter_context(ended_by_signals())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._signals:
            self.stop_all()

    def check_memory(self, names: Sequence[str]) -> None:
        """Refuse servers that run at the same time and ask for more than a GPU has.

        Args:
            names: of all of them; those that run already elsewhere do not count.

        Raises:
            ValueError: with the option to change and a value that fits.
        """
        count = sum(name not in self._own.urls for name in names)
        if not self.on_gpu or not count:
            return
        key, most = _MEMORY[self._engine], _MOST_MEMORY
        share = self._options.get(key)
        if self._engine == "vllm":  # of all there is, whatever is taken; SGLang's is of what is free
            share = _VLLM_SHARE if share is None else share
            most -= _taken()
        elif count == 1:
            return
        if not isinstance(share, int | float) or count * share > most:
            raise ValueError(
                f"serving.{self._engine}.options.{key} is {share}, the share of the GPU's memory that a "
                f"server takes, and of {count} at the same time each finds {most / count:.2f}: set it to "
                f"{int(100 * most / count) / 100} or less where the model fits into that, name "
                f"servers on other GPUs in serving.{self._engine}.urls, or compare fewer at once"
            )

    @property
    def on_gpu(self) -> bool:
        """Whether the servers that are started here run on a GPU."""
        return torch.cuda.is_available() and self._options.get("device", "cuda") == "cuda"

    def url(
        self,
        name: str,
        speculation: Speculation | None,
        compiled: bool | None = False,
        options: Mapping[str, Option] | None = None,
    ) -> str:
        """The URL of a server that serves this, started now unless params.yaml names one that runs.

        Args:
            compiled: through torch.compile; None: as the engine does by itself.
            options: beside those of params.yaml.

        Raises:
            ValueError, ServerError: as `launch` and `command`; if the one that runs serves something else.
        """
        service = Service(paths.TARGET, self._dtype, speculation, compiled)
        if name in self._own.urls:
            url = self._own.urls[name]
            check_service(Client(self._engine, url), service, print)
            return url
        if not (paths.TARGET / "config.json").is_file():
            raise ValueError(f"{paths.TARGET} holds no model: prepare the target first: dvc repro target")
        self.stop(name)  # of an earlier trial
        self.check_memory([name, *self._started])
        python = shutil.which(self._own.python)
        if python is None:
            folder = f".venv-{self._engine}"
            raise ValueError(
                f"serving.{self._engine}.python: {self._own.python} does not exist, or cannot be run; the "
                f"engine needs an environment of its own: python -m venv {folder} && {folder}/bin/pip "
                f"install {_PACKAGES[self._engine]}, or name the Python of the one that you have"
            )
        port = self._port()
        words = command(
            self._engine,
            Path(python),
            service,
            self._settings.host,
            port,
            {**self._attention(), **self._options, **self._memory(), **(options or {})},
        )
        # The tools of the engine's environment (ninja, for kernels made on the spot) are found on the path.
        tools = os.pathsep.join([str(Path(python).absolute().parent), os.environ.get("PATH", os.defpath)])
        print(f"starting {self._engine} for {name} on port {port}", flush=True)
        with ExitStack() as stack:
            server = stack.enter_context(
                launch(
                    words,
                    self._settings.host,
                    port,
                    self._logs / f"{self._engine}-{name.replace('/', '-')}.log",  # a tree is called 2/3/6
                    environment={"PATH": tools, **self._own.environment},
                    timeout=self._settings.start_timeout,
                )
            )
            self._started[name] = _Started(server, port, stack.pop_all())
        return server.url

    def runs_elsewhere(self, name: str) -> bool:
        """Whether params.yaml names a server for this that runs already."""
        return name in self._own.urls

    @contextmanager
    def explaining(self, name: str) -> Iterator[None]:
        """Add to a ServerError what became of the server of that name, where one was started."""
        try:
            yield
        except ServerError as error:
            if name not in self._started:
                raise
            raise self._started[name].server.explain(error) from error

    def stop(self, name: str) -> None:
        """End the server of that name, where one was started."""
        started = self._started.pop(name, None)
        if started is not None:
            started.stack.close()

    def stop_all(self) -> None:
        """End every server that was started, also where one fails to end."""
        with ExitStack() as stack:
            for name in list(self._started):
                stack.callback(self.stop, name)

    def _port(self) -> int:
        """A free port, or the first from serving.port on that no server here has."""
        port = self._settings.port
        if not port:
            return free_port(self._settings.host)
        taken = {started.port for started in self._started.values()}
        while port in taken:
            port += 1
        return port

    def _attention(self) -> dict[str, Option]:
        return (
            _FLOAT32_ATTENTION
            if self._engine == "sglang" and self._dtype == "float32" and self.on_gpu
            else {}
        )

    def _memory(self) -> dict[str, Option]:
        """SGLang takes its share of what is free, so that a later server asks for more to get the same."""
        key = _MEMORY[self._engine]
        share = self._options.get(key)
        if self._engine != "sglang" or not self._started or not isinstance(share, int | float):
            return {}
        left = 1 - len(self._started) * share
        return {key: round(share / left, 3)} if left > share else {}


def _taken() -> float:
    """The share of the GPU's memory that is taken now, by the native engine's target above all."""
    free, total = torch.cuda.mem_get_info()
    return 1.0 - float(free) / float(total)
