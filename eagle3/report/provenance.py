"""Where and of what a result beside the evaluation was measured, and its own verdict."""

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3.report.blocks import Paragraph, Tone
from eagle3.report.inputs import Inputs
from eagle3.report.tables import flatten

# What a process may be given of one and the same machine.
_SHARE = {"usable_cores", "threads"}


def provenance_paragraphs(
    inputs: Inputs, result: Mapping[str, Any], same_drafts: bool = False
) -> Iterator[Paragraph]:
    """The result's own verdict with its reservations, a warning where it was measured otherwise than the
    evaluation, its command and commit.

    Args:
        same_drafts: whether it should be of the evaluation's drafts; a study trains its own.
    """
    verdict = result.get("verdict")
    if verdict:
        yield Paragraph(verdict["summary"])
        reserved = (check for check in verdict["checks"] if check["level"] in ("failure", "warning"))
        yield from (Paragraph(check["sentence"]) for check in reserved)
    evaluation = inputs.evaluation
    mine, theirs = evaluation["settings"]["subject"], result.get("settings", {}).get("subject", result)
    differs = []
    changed = _changed(evaluation["machine"], result["machine"]) if "machine" in result else set()
    if changed:
        machine = "share of the machine" if _SHARE.issuperset(changed) else "machine"
        differs.append(f"{machine} (other {', '.join(sorted(changed))})")
    if "target" in theirs and "target" in mine and theirs["target"] != mine["target"]:
        differs.append("target, or with other captured layers of it,")
    if "draft_dtype" in theirs and "draft_dtype" in mine and theirs["draft_dtype"] != mine["draft_dtype"]:
        differs.append(f"dtype of the drafts ({theirs['draft_dtype']})")
    if same_drafts:
        drafts = {name: mine.get("drafts", {}).get(name) for name in theirs.get("drafts", {})}
        if not drafts or drafts != theirs["drafts"]:
            differs.append("training of the drafts" if drafts else "draft, or one that was not recorded,")
    if differs:
        yield Paragraph(
            f"Measured on another {' and '.join(differs)} than the evaluation above.", Tone.WARNING
        )
    origin = result.get("origin") or result.get("settings", {}).get("origin") or {}
    if "command" in origin:
        yield Paragraph(f"Command: {origin['command']}{_at(origin, evaluation['settings']['origin'])}")


def _at(origin: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
    """Of which code, where it is another than the evaluation's."""
    if origin.get("commit") == beside.get("commit") and not origin.get("dirty"):
        return ""
    changes = ", with changes that no commit holds" if origin.get("dirty") else ""
    return f" (at commit {str(origin.get('commit', 'unknown'))[:12]}{changes})"


def _changed(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    """Dotted keys whose values differ; an empty value is as good as none."""
    return {name for name, _ in {*flatten(mine)} ^ {*flatten(theirs)}}
