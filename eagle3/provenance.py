"""Who made a file: fingerprints of machine, code and data; atomic writers: a file is whole or absent."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

if TYPE_CHECKING:
    import pandas as pd

# The libraries whose version can change a measured time or a generated token.
MEASURED_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
# Of /proc/cpuinfo's hundred flags, those that decide which matrix kernels run.
_VECTOR_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve"),  # the ARM names
)
# As git's pathspecs: what the pipeline writes into the tree, and the settings, which results record in full.
_WRITTEN = (":!reports", ":!dvc.lock", ":!params.yaml")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a neighbour of ``path`` to write to; it is renamed over ``path`` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: writers such as numpy's append one that they do not see.
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically: readable, in the given key order; NaN and infinity are refused (ValueError)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, atomically."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def write_yaml(path: Path, value: object) -> None:
    """Write YAML atomically, in the given key order."""
    write_text(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def write_parquet(path: Path, frame: "pd.DataFrame") -> None:
    """Write a Parquet file atomically. The bytes depend on the rows alone."""
    with replacing(path) as temporary:
        frame.to_parquet(temporary, index=False)


def sha256_file(path: Path) -> str:
    """The sha256 of one file as hexadecimal text, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_tree(path: Path) -> str:
    """The sha256 of a file, or of a folder's relative paths and contents; independent of times and order."""
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        raise ValueError(f"{path}: there is nothing to hash here; run the stage that makes it first")
    digest = hashlib.sha256()
    files = (item for item in path.rglob("*") if item.is_file() and item.parent.name != "__pycache__")
    for file in sorted(files):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()


def hash_stage_code(stage: str, root: Path = Path()) -> str:
    """The sha256 of the code that dvc.yaml lists as dependencies of a stage.

    What a killed stage left is gone on with only if this is the same: DVC keeps such files, and shards of an
    older program would be taken for the new one's.
    """
    entry = yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"][stage]
    deps = entry.get("do", entry)["deps"]
    code = [dep for dep in deps if dep.startswith(("eagle3/", "experiments/"))]
    return hash_object({dep: hash_tree(root / dep) for dep in code})


def hash_object(value: object) -> str:
    """The sha256 of a JSON-like value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def library_versions(names: Iterable[str] = MEASURED_LIBRARIES) -> dict[str, str]:
    """Installed versions by distribution name, read without importing anything."""
    return {name: importlib.metadata.version(name) for name in names}


def fingerprint_machine() -> dict[str, Any]:
    """What decides how fast this machine is and what it computes; equal on equal machines, no names, no load.

    Free memory, host name, load and clock are left out: they change from minute to minute and would make
    every run look like another machine.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "cpu": _cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(logical=True),
        "usable_cores": len(affinity),
        "instruction_set": _instruction_set(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "libraries": library_versions(),
    }


def describe_run(root: Path, command: str) -> dict[str, Any]:
    """What a result records of its making: the command, and the code as `fingerprint_code` tells it."""
    return {"command": command, **fingerprint_code(root)}


def script_command(script: str) -> str:
    """The command line of the running script, as somebody would type it in the project's folder."""
    return shlex.join(["python", script, *map(without_password, sys.argv[1:])])


def without_password(text: str) -> str:
    """The text with the passwords of the URLs in it left out: results are published."""
    return re.sub(r"(\w://[^\s:/@]*):[^\s/@]+@", r"\1:***@", text)


def fingerprint_code(root: Path) -> dict[str, Any]:
    """The commit of the tree at ``root``, whether it is dirty, and a hash of what differs from the commit.

    What the pipeline itself writes (`_WRITTEN`) does not make a tree dirty, nor does params.yaml, which every
    result records. Outside of git the three are "unknown", True and "": a run must not claim a version that
    it does not have.
    """
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": "unknown", "dirty": True, "diff_sha256": ""}
    # Untracked files count: a new module that nobody added is part of what ran.
    others = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".", *_WRITTEN)
    untracked = (others or "").split("\0")
    diff = _git(root, "diff", "HEAD", "--binary", "--", ".", *_WRITTEN) or ""
    digest = hashlib.sha256(diff.encode())
    new_files = [root / name for name in untracked if name and (root / name).is_file()]
    for file in new_files:
        digest.update(f"{file.relative_to(root).as_posix()}\0{sha256_file(file)}\n".encode())
    dirty = bool(diff or new_files)
    return {"commit": commit.strip(), "dirty": dirty, "diff_sha256": digest.hexdigest() if dirty else ""}


def short_hash(value: object) -> str:
    """The first twelve digits of ``hash_object``, for tags and names."""
    return hash_object(value)[:12]


def _git(root: Path, *arguments: str) -> str | None:
    """The output of a git command, or None where git or a repository with a commit is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _instruction_set() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return []
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    flags = next(
        (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), []
    )
    return [flag for flag in _VECTOR_FLAGS if flag in flags]


def _gpus() -> list[str]:
    """Names and memory of the visible GPUs; asks nvidia-smi, so that a cheap stage need not import torch."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
