"""Overwrite params.yaml with a profile: the default one, with the changes of the named one laid over it."""

import argparse
from pathlib import Path

from cli import read_settings, run_in_words
from eagle3.parameters import write_profile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    known = sorted(path.stem for path in Path("profiles").glob("*.yaml"))
    parser.add_argument("name", help=f"one of: {', '.join(known)}")
    parser.add_argument("--output", type=Path, default=Path("params.yaml"), help="the file to overwrite")
    arguments = parser.parse_args()
    write_profile(arguments.name, arguments.output)
    read_settings(arguments.output)
    print(f"{arguments.output} is now the {arguments.name} profile")


if __name__ == "__main__":
    run_in_words(main)
