"""Open MLflow's user interface on the runs of this project."""

import os
import sys

from cli import read_settings, run_in_words, stage_parser


def main() -> None:
    parser = stage_parser(__doc__)
    parser.add_argument("--port", type=int, default=5000, help="of the user interface, on 127.0.0.1")
    arguments = parser.parse_args()
    settings = read_settings(arguments.params)
    from eagle3.tracking import tracking_uri

    uri = tracking_uri(settings.tracking)
    if uri.startswith(("http://", "https://")):
        sys.exit(f"tracking.uri of {arguments.params} is a server with an interface of its own: open {uri}")
    words = ["mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(arguments.port)]
    os.execvp(words[0], [*words, "--workers", "1"])


if __name__ == "__main__":
    run_in_words(main)
