"""Servers of SGLang or vLLM: start one and keep it, or measure the experiments of params.yaml."""

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from cli import choose_device, read_settings, run_in_words, stage_parser
from eagle3.config import ServedExperiment, Settings

if TYPE_CHECKING:
    from eagle3.serving.engines import Engine

_LOOK = 5.0  # seconds between two looks whether a kept server still answers


def chosen(settings: Settings, name: str) -> ServedExperiment:
    """The experiment of that name; an unknown one ends the program."""
    known = {experiment.name: experiment for experiment in settings.serving.experiments}
    if name not in known:
        sys.exit(f"{name!r} is no experiment of params.yaml: choose {', '.join(known)}, or add it to serving")
    return known[name]


def keep(settings: Settings, engine: "Engine", name: str) -> None:
    """Start one server and keep it until it is interrupted, or dies."""
    from eagle3.serving.client import Client
    from eagle3.serving.experiments import speculation_for
    from eagle3.serving.servers import Servers

    experiment = chosen(settings, name)
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(settings, engine))
        url = servers.url(name, speculation_for(engine, experiment), experiment.compile)
        elsewhere = "it was not started here, and Ctrl-C ends the watching"
        then = elsewhere if servers.runs_elsewhere(name) else "Ctrl-C ends it"
        print(f"{engine} serves {name} at {url}; {then}", flush=True)
        client = Client(engine, url)
        with servers.explaining(name):
            while True:
                time.sleep(_LOOK)
                client.version()


def main() -> None:
    parser = stage_parser(__doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start a server and keep it")
    measure = commands.add_parser("measure", help="measure the experiments; writes reports/serving.json")
    for command in (start, measure):
        command.add_argument("engine", choices=("sglang", "vllm"))
    start.add_argument("experiment", help="one of serving.experiments")
    measure.add_argument("experiments", nargs="*", help="some of serving.experiments; none: all")
    arguments = parser.parse_args()
    settings = read_settings(arguments.params)

    from eagle3.serving.experiments import measure_engine

    try:
        if arguments.command == "start":
            keep(settings, arguments.engine, arguments.experiment)
        else:
            names = arguments.experiments or [item.name for item in settings.serving.experiments]
            experiments = [chosen(settings, name) for name in names]
            measure_engine(settings, arguments.engine, experiments, choose_device())
    except KeyboardInterrupt:
        sys.exit("stopped; the servers that this started are ended")


if __name__ == "__main__":
    run_in_words(main)
