"""Write what decides this machine's speed, and the hash of the sweep's result, if there is one.

A changed file makes `dvc repro` measure again.
"""

from pathlib import Path

from cli import stage_parser
from eagle3 import paths
from eagle3.provenance import fingerprint_machine, sha256_file, write_json


def main() -> None:
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--output", type=Path, default=paths.MACHINE, help="the file for the machine; the other goes beside"
    )
    arguments = parser.parse_args()
    write_json(arguments.output, fingerprint_machine())
    write_json(
        arguments.output.with_name(paths.TUNED.name),
        {"best_params": sha256_file(paths.BEST) if paths.BEST.is_file() else None},
    )


if __name__ == "__main__":
    main()
