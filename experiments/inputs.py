"""Write the hashes of files and folders that params.yaml names, so that a changed one is used again."""

import shutil
import sys
from pathlib import Path

from cli import read_settings, run_in_words, stage_parser
from eagle3 import paths
from eagle3.config import ExternalModelSettings, ExternalSettings, Settings
from eagle3.provenance import hash_tree, write_json
from eagle3.sources import parse_source


def named_paths(settings: Settings) -> dict[str, Path]:
    """By the key of params.yaml that names it; sources that are fetched have a version and are left out."""
    from eagle3.data.readers import split_limit

    found = {
        f"prompts.files.{index}": split_limit(name)[0] for index, name in enumerate(settings.prompts.files)
    }
    found |= {f"tasks.files.{task}": name for task, name in settings.tasks.files.items()}
    if parse_source(settings.target.source).kind == "path":
        found["target.source"] = settings.target.source
    return {key: Path(name).expanduser() for key, name in found.items()}


def draft_paths(settings: Settings) -> dict[str, Path]:
    """By the key of params.yaml that names it, the drafts from elsewhere that lie in a folder here."""
    return {
        f"drafts.{name}.source": Path(draft.source).expanduser()
        for name, draft in settings.drafts.items()
        if isinstance(draft, ExternalSettings | ExternalModelSettings)
        and parse_source(draft.source).kind == "path"
    }


def main() -> None:
    arguments = stage_parser(__doc__).parse_args()
    settings = read_settings(arguments.params)
    drafts = draft_paths(settings)
    named = {**named_paths(settings), **drafts}
    missing = [f"{key}: {path} does not exist" for key, path in named.items() if not path.exists()]
    if missing:
        sys.exit("\n".join([*missing, "correct the path in params.yaml"]))
    hashes = {key: hash_tree(path) for key, path in named.items()}
    write_json(paths.INPUTS, {key: value for key, value in hashes.items() if key not in drafts})
    shutil.rmtree(paths.DRAFT_INPUTS, ignore_errors=True)
    for name in settings.drafts:
        write_json(paths.DRAFT_INPUTS / f"{name}.json", {"source": hashes.get(f"drafts.{name}.source")})


if __name__ == "__main__":
    run_in_words(main)
