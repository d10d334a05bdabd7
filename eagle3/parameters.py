"""Parameter files: reading YAML, laying one profile over another, and saying in words what is wrong."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from eagle3.provenance import replacing

_EXPECTED = {
    "int_type": "give a whole number",
    "int_from_float": "give a whole number",
    "float_type": "give a number",
    "bool_type": "give true or false",
    "string_type": "give a text",
    "tuple_type": "give a list",
    "dict_type": "give a mapping of names to values",
    "model_type": "give a section with keys",
    "finite_number": "give a finite number",
    "greater_than": "give a number greater than {gt}",
    "greater_than_equal": "give a number of at least {ge}",
    "less_than": "give a number less than {lt}",
    "less_than_equal": "give a number of at most {le}",
    "literal_error": "choose {expected}",
    "union_tag_invalid": "choose {expected_tags} as {discriminator}",
    "union_tag_not_found": "give it a {discriminator}",
    "too_short": "give at least {min_length}",
    "too_long": "give exactly {max_length}",
    "string_too_short": "give a text that is not empty",
}
# The patterns of texts, and what is to be given where a text does not match.
NAME = r"^[a-z0-9][a-z0-9._-]*$"
DRAFT_NAME = r"^[a-z0-9][a-z0-9_-]*$"
URL = r"^https?://"
_PATTERNS = {
    NAME: "use a-z, 0-9, '-', '_' and '.', starting with a letter or digit",
    DRAFT_NAME: "use a-z, 0-9, '-' and '_', starting with a letter or digit; dvc.yaml cuts a name at a dot",
    URL: "give an address that starts with http:// or https://",
}


class SettingsError(ValueError):
    """A parameter file that cannot be used; the message has one line a problem: file, key, value, remedy."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML 1.2 mapping (so that 1e-3 is a number); a repeated key or any other content is an error."""
    if not path.is_file():
        raise SettingsError(
            f"{path}: there is no such file; run from the project's folder or name it with --params"
        )
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except YAMLError as error:
        raise SettingsError(f"{path}: this is not valid YAML, correct it:\n{error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected sections with keys, found {values!r:.40}")
    return values


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ``overrides`` over ``base``: mappings are merged key by key, anything else is replaced whole.

    null over a mapping takes it out: a profile that does not train a draft of the default one says so.
    """
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(merged.get(key), Mapping) and value is None:
            del merged[key]
        elif isinstance(merged.get(key), Mapping) and isinstance(value, Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def read_profile(name: str, folder: Path = Path("profiles")) -> dict[str, Any]:
    """The default profile with the named one laid over it, as values."""
    base = read_yaml(folder / "default.yaml")
    return base if name == "default" else merge(base, read_yaml(_profile_path(name, folder)))


def write_profile(name: str, path: Path, folder: Path = Path("profiles")) -> None:
    """Write a profile to ``path`` as params.yaml, with the default profile's comments."""
    yaml = YAML()
    yaml.width = 160
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), _represent_null)
    commented: CommentedMap = yaml.load((folder / "default.yaml").read_text(encoding="utf-8"))
    if name != "default":
        _merge_commented(commented, read_yaml(_profile_path(name, folder)))
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        yaml.dump(commented, stream)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists of mappings are numbered, other lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{dotted}.")
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            flat |= flatten({str(index): item for index, item in enumerate(value)}, f"{dotted}.")
        else:
            flat[dotted] = value
    return flat


def describe_errors(
    error: ValidationError, values: Mapping[str, Any], model: type[BaseModel], origin: str
) -> str:
    """One line a problem: where, which value, and what to do instead."""
    return "\n".join(f"{origin}: {_describe(dict(item), values, model)}" for item in error.errors())


def to_json(values: Mapping[str, Any]) -> str:
    """Values as JSON, for strict checking; dates and other YAML types become texts, which it refuses."""
    return json.dumps(values, default=str)


def _describe(item: dict[str, Any], values: Mapping[str, Any], model: type[BaseModel]) -> str:
    path = _path(item["loc"], values, missing=item["type"] == "missing")
    dotted = ".".join(path)
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        return f"{dotted}: this key is missing; add it (profiles/default.yaml has an example)"
    if kind == "extra_forbidden":
        return f"{dotted}: unknown key (value {_show(value)}); {_nearest(path, model)}"
    if kind == "value_error":
        return f"{dotted}: {context['error']}" if dotted else str(context["error"])
    expected = _EXPECTED.get(kind) or _PATTERNS.get(context.get("pattern"))
    remedy = expected.format(**context) if expected else item["msg"]
    return f"{dotted}: value {_show(value)} is not possible; {remedy}"


def _path(location: tuple[int | str, ...], values: Any, missing: bool) -> list[str]:
    """The error's place in the file: pydantic's location without the tags that it adds for unions."""
    path: list[str] = []
    for index, part in enumerate(location):
        if isinstance(values, Mapping):
            inside = part in values
        else:
            inside = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if inside:
            values = values[part]
            path.append(str(part))
        elif missing and index == len(location) - 1:
            path.append(str(part))
    return path


def _nearest(path: list[str], model: type[BaseModel]) -> str:
    """What the user may have meant: a like key of this section, or this key of another section."""
    *parent, name = path
    keys = set(_known_keys(model))
    siblings = sorted(key[-1] for key in keys if _same_place(key[:-1], parent))
    close = difflib.get_close_matches(name, siblings, n=1)
    elsewhere = sorted(".".join(key) for key in keys if key[-1] == name)
    if close:
        return f"did you mean {'.'.join([*parent, close[0]])}?"
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"remove it, or use one of: {', '.join(siblings)}"


def _same_place(pattern: tuple[str, ...], place: list[str]) -> bool:
    return len(pattern) == len(place) and all(a in ("*", b) for a, b in zip(pattern, place, strict=True))


def _known_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for section, place in _sections(field.annotation, (*prefix, name)):
            yield from _known_keys(section, place)


def _sections(annotation: Any, place: tuple[str, ...]) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    """The models inside an annotation, with "*" for each mapping's key or list's index on the way."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, place
    inner = (*place, "*") if get_origin(annotation) in (dict, tuple) else place
    for argument in get_args(annotation):
        yield from _sections(argument, inner)


def _show(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _profile_path(name: str, folder: Path) -> Path:
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in folder.glob("*.yaml")))
        raise SettingsError(f"profile {name!r}: there is no {path}; choose from {known}")
    return path


def _represent_null(representer: RoundTripRepresenter, _: None) -> ScalarNode:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _merge_commented(base: CommentedMap, overrides: Mapping[str, Any]) -> None:
    """``merge`` in place, which keeps the comments of the base."""
    for key, value in overrides.items():
        if isinstance(base.get(key), CommentedMap) and value is None:
            del base[key]
        elif isinstance(base.get(key), CommentedMap) and isinstance(value, Mapping):
            _merge_commented(base[key], value)
        else:
            base[key] = value
