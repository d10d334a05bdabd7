"""Write what decides this machine's speed, and hashes of what evaluation reads beside the pipeline.

That is the sweep's result, where there is one, and the servers' settings, where servers are evaluated. A
changed file makes `dvc repro` measure again.
"""

from pathlib import Path

from cli import read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.provenance import fingerprint_machine, hash_object, sha256_file, write_json


def main() -> None:
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--output", type=Path, default=paths.MACHINE, help="the file for the machine; the other goes beside"
    )
    arguments = parser.parse_args()
    settings = read_settings(arguments.params)
    served = settings.evaluate.engine != "native"
    write_json(arguments.output, fingerprint_machine())
    write_json(
        arguments.output.with_name(paths.TUNED.name),
        {
            "best_params": sha256_file(paths.BEST) if paths.BEST.is_file() else None,
            "serving": hash_object(settings.serving.model_dump(mode="json")) if served else None,
        },
    )


if __name__ == "__main__":
    run_in_words(main)
