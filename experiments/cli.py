"""What the stages' scripts share: the project on the import path, options with defaults, checked settings.

The scripts import the rest of the project after their settings are read, so that `--help` and a refused
params.yaml take no time.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

# The code beside the script counts, not an installed copy: DVC runs experiments in copies of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3.config import Settings, load_settings
from eagle3.parameters import SettingsError


def stage_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help shows the defaults, with the options every stage has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="the settings to run with")
    return parser


def read_settings(path: Path) -> Settings:
    """All of params.yaml, checked; a problem ends the program with one line for each."""
    try:
        return load_settings(path)
    except SettingsError as error:
        sys.exit(str(error))


def run_in_words(main: Callable[[], None]) -> None:
    """Run a script's main; a refusal ends it with the reason and the notes beside it, without a traceback."""
    try:
        main()
    except ValueError as error:
        sys.exit("\n".join([str(error), *getattr(error, "__notes__", [])]))


def choose_device() -> str:
    """The first GPU where there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
