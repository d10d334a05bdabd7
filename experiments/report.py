"""Write the report: tables, figures and how each number was measured, as a web page and as Markdown."""

import json
from pathlib import Path
from typing import Any

from cli import read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.config import Settings, parse_settings
from eagle3.parameters import read_profile
from eagle3.tracking import Tracker


def read_json(path: Path) -> dict[str, Any]:
    """A manifest, which the stage that made the folder wrote into it."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def command_of(settings: Settings) -> str:
    """What makes this report from a clone: where the settings are a profile, its name comes first."""
    folder = paths.REPORTS.resolve().parent / "profiles"
    for path in sorted(folder.glob("*.yaml")):
        if path.stem != "default" and parse_settings(read_profile(path.stem, folder)) == settings:
            return f"make profile NAME={path.stem}\nmake repro"
    return "make repro"


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)

    from eagle3.report.build import build

    names = settings.evaluate.draft_names
    build(
        paths.REPORTS,
        training={name: paths.TRAINING / f"{name}.jsonl" for name in names},
        target=read_json(paths.TARGET / "target.json"),
        drafts={name: read_json(paths.DRAFTS / name / "manifest.json") for name in names},
        command=command_of(settings),
    )
    with Tracker.open(settings).run("report", "report") as run:
        for name in ("index.html", "README.md", "figures"):
            run.log_artifact(paths.REPORTS / name)
    print(f"{paths.REPORTS / 'index.html'} and {paths.REPORTS / 'README.md'} are written")


if __name__ == "__main__":
    run_in_words(main)
