"""Write what decides this machine's speed to a file; a changed file makes `dvc repro` measure again."""

from pathlib import Path

from cli import stage_parser
from eagle3 import paths
from eagle3.provenance import fingerprint_machine, write_json


def main() -> None:
    parser = stage_parser(__doc__)
    parser.add_argument("--output", type=Path, default=paths.MACHINE, help="the file to write")
    arguments = parser.parse_args()
    write_json(arguments.output, fingerprint_machine())


if __name__ == "__main__":
    main()
