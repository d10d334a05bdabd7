"""Compile the CPU kernels for this machine, once, into the cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  - loads the OpenMP runtime first, so that the kernels share torch's thread pool

from eagle3.sources import cache_root


class LinearLayer(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class AttentionLayer(ctypes.Structure):
    """`AttentionLayer` of decoder.cpp."""

    _fields_ = (
        ("qkv", LinearLayer),
        ("output", LinearLayer),
        ("input_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("query_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("input_eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
    )


class FeedForwardLayer(ctypes.Structure):
    """`FeedForwardLayer` of decoder.cpp."""

    _fields_ = (
        ("gate_up", LinearLayer),
        ("down", LinearLayer),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


SOURCE = Path(__file__).with_name("decoder.cpp")  # and the headers beside it
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17")

log = logging.getLogger(__name__)


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None (said once, as a warning) where no C++ compiler is found or it fails."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        log.warning(
            "no C++ compiler found: decoding uses plain torch, several times slower for draft trees; "
            "install g++"
        )
        return None
    path = _library_path(compiler)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / path.name
            run = subprocess.run(
                [compiler, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, text=True
            )
            if run.returncode:
                log.warning(
                    "compiling %s with %s failed: decoding uses plain torch, several times slower for draft "
                    "trees; name a compiler with OpenMP in CXX. It said:\n%s",
                    SOURCE.name,
                    compiler,
                    run.stderr.strip(),
                )
                return None
            built.replace(path)  # atomic: processes that build at the same time do not see half a file
    return _declare(ctypes.CDLL(str(path)))


def _library_path(compiler: str) -> Path:
    """A name for exactly this source, compiler and processor (the code uses the machine's instructions)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    native = subprocess.run(
        [compiler, "-march=native", "-Q", "--help=target"], capture_output=True, text=True
    ).stdout
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    parts = (*sources, " ".join(FLAGS), compiler, version, native, platform.machine())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_root() / "kernels" / f"decoder-{digest[:16]}.so"


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures = {
        "linear": [pointer] * 3 + [integer],
        "rms_norm": [pointer] * 3 + [integer] * 2 + [real],
        "attention_layer": [pointer] * 7 + [integer] * 2 + [pointer] * 2 + [integer, pointer] + [integer] * 3,
        "feed_forward_layer": [pointer] * 3 + [integer],
        "bfloat16_side_by_side": [],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.bfloat16_side_by_side.restype = integer
    return library
