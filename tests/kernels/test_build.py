"""Compiling: once a machine, without a compiler a warning and plain torch, with a broken one its message."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.kernels import build, select_ops


@pytest.fixture(autouse=True)
def _fresh_kernels() -> Iterator[None]:
    """Forget what was loaded, before and after."""
    build.load_kernels.cache_clear()
    yield
    build.load_kernels.cache_clear()


def test_without_a_compiler_torch_takes_over_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert select_ops("cpu").name == "torch"
        assert select_ops("cpu").name == "torch"
    (record,) = [record for record in caplog.records if record.name == build.__name__]
    assert "no C++ compiler" in record.message
    assert "install g++" in record.message


def test_a_compiler_that_fails_is_said_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some compilers lack OpenMP: plain torch works, and the warning says why everything is slower."""
    compiler = tmp_path / "broken-compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such header: vector" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels() is None
    (record,) = [record for record in caplog.records if record.name == build.__name__]
    assert "no such header: vector" in record.getMessage()
    assert "several times slower" in record.getMessage()
    assert not list((tmp_path / "kernels").iterdir())


def test_compiled_once_and_again_only_for_another_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "decoder.cpp"  # the same functions without their bodies: compiles at once
    names = ("linear", "rms_norm", "attention_layer", "feed_forward_layer", "bfloat16_side_by_side")
    source.write_text('extern "C" {' + " ".join(f"void {name}() {{}}" for name in names) + "}\n")
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(build, "SOURCE", source)
    assert build.load_kernels() is not None
    (first,) = (tmp_path / "kernels").iterdir()
    made = first.stat().st_mtime_ns

    build.load_kernels.cache_clear()
    assert build.load_kernels() is not None
    assert first.stat().st_mtime_ns == made

    source.write_text(source.read_text() + "// changed\n")
    build.load_kernels.cache_clear()
    assert build.load_kernels() is not None
    assert len(list((tmp_path / "kernels").iterdir())) == 2

    (tmp_path / "linear.h").write_text("// what it includes\n")
    build.load_kernels.cache_clear()
    assert build.load_kernels() is not None
    assert len(list((tmp_path / "kernels").iterdir())) == 3, "a header is part of the source"


def test_torch_is_chosen_where_asked_for() -> None:
    assert select_ops("cpu", compiled=False).name == "torch"
    assert select_ops("cpu").name == "compiled"
