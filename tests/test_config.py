"""A params.yaml that cannot work is refused before anything starts, naming key, value and remedy."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.config import HeadMethod, Settings, load_settings, parse_settings
from eagle3.parameters import SettingsError, flatten, merge, read_profile, read_yaml, write_profile

PROFILES = Path(__file__).parents[1] / "profiles"
DEFAULT = read_profile("default", PROFILES)

Path_ = tuple[str | int, ...]


def leaves(values: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The places of all values that are not sections themselves."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def changed(path: Path_, value: Any) -> dict[str, Any]:
    """The default profile with one value replaced or added."""
    values = copy.deepcopy(DEFAULT)
    inner: Any = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return values


def refusal(path: Path_, value: Any) -> str:
    """What the user reads when the value is set."""
    with pytest.raises(SettingsError) as caught:
        parse_settings(changed(path, value))
    return str(caught.value)


def test_committed_params_and_all_profiles_are_valid() -> None:
    load_settings(PROFILES.parent / "params.yaml")
    for profile in PROFILES.glob("*.yaml"):
        parse_settings(read_profile(profile.stem, PROFILES), profile.name)


def test_committed_params_have_the_keys_of_the_default_profile() -> None:
    """A key that only one of the two has was forgotten in the other."""
    params = read_yaml(PROFILES.parent / "params.yaml")
    assert {key: set(section) for key, section in params.items() if isinstance(section, dict)} == {
        key: set(section) for key, section in DEFAULT.items() if isinstance(section, dict)
    }


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("train", "lrr"), 0.1, ["train.lrr", "0.1", "did you mean train.lr?"]),
        (("train", "size"), 8, ["train.size", "8", "did you mean vocabulary.size?"]),
        (("nonsense",), 1, ["nonsense", "1", "one of: drafts, evaluate"]),
        (("train", "lr"), "fast", ["train.lr", '"fast"', "give a number"]),
        (("train", "lr"), float("nan"), ["train.lr", "NaN", "give a finite number"]),
        (("train", "lr"), -1, ["train.lr", "-1", "greater than 0"]),
        (("train", "batch_tokens"), 1.5, ["train.batch_tokens", "1.5", "whole number"]),
        (("train", "batch_tokens"), True, ["train.batch_tokens", "true", "whole number"]),
        (("train", "betas"), [0.9], ["train.betas.1", "missing"]),
        (("train",), 3, ["train", "3", "section"]),
        (("drafts", "eagle3", "los"), "x", ["drafts.eagle3.los", '"x"', "did you mean drafts.eagle3.loss?"]),
        (("drafts", "eagle3", "family"), "eagle4", ["drafts.eagle3", "'eagle', 'eagle3'"]),
        (("drafts", "Big"), {"family": "eagle"}, ["drafts.Big", '"Big"', "a-z"]),
        (("drafts", "eagle3.1"), DEFAULT["drafts"]["eagle3"], ["drafts.eagle3.1", "dvc.yaml", "at a dot"]),
        (("tasks", "names"), ["MT bench"], ["tasks.names.0", '"MT bench"', "'_' and '.', starting with"]),
        (("regenerate", "endpoints"), ["localhost:30000"], ["endpoints.0", '"localhost:30000"', "http://"]),
        (("serving", "vllm", "urls"), {"eagle3": "host:80"}, ["urls.eagle3", '"host:80"', "http://"]),
        (("evaluate", "tasks"), [], ["evaluate.tasks", "[]", "at least 1"]),
        (("evaluate", "tasks"), ["chess"], ["evaluate.tasks", "'chess'", "tasks.names"]),
        (
            ("evaluate", "methods", 0, "draft"),
            "egale",
            ["evaluate.methods", "'egale'", "eagle, small, eagle3"],
        ),
        (("evaluate", "methods", 0, "draft"), "eagle3", ["'model'", "family independent", "'eagle3'"]),
        (
            ("evaluate", "methods", 5, "draft"),
            "small",
            ["'head'", "family eagle, eagle3, external", "'small'"],
        ),
        (("evaluate", "methods", 1, "max_ngram"), 1, ["prompt-lookup", "min_ngram 2", "max_ngram 1"]),
        (("evaluate", "methods", 2, "paths"), [[0, 0]], ["evaluate.methods.2", "parent of path (0, 0)"]),
        (
            ("sweep", "space", "drafts"),
            ["small"],
            ["sweep.space.drafts", "'small'", "eagle, eagle3, external"],
        ),
        (("evaluate", "methods", 0, "name"), "vanilla", ["evaluate", "'vanilla'", "a name of its own"]),
        (("evaluate", "methods", 5, "tree", "top_k"), 1, ["evaluate.methods.5.tree.top_k", "tree.topk?"]),
        (("serving", "experiments", 1, "name"), "vanilla", ["serving", "'vanilla'", "a name of its own"]),
        (("regenerate", "capture_hidden_states"), False, ["train.hidden_states", "'captured'", "online"]),
    ],
)
def test_refusal_names_key_value_and_remedy(path: Path_, value: Any, parts: list[str]) -> None:
    message = refusal(path, value)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("batch_size",), 2, ["sweep.batch_size: 2", "set it to 1"]),
        (("space", "confidences"), [0.1], ["sweep.space.confidences: [0.1]", "set it to [0.0]"]),
        (("space", "threads"), [1, 2], ["threads [1, 2]", "give one value each"]),
    ],
)
def test_what_a_served_sweep_cannot_vary_is_refused(path: Path_, value: Any, parts: list[str]) -> None:
    values = changed(("sweep", "engine"), "sglang")
    inner = values["sweep"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(SettingsError) as caught:
        parse_settings(values)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ((3, 1, 5), ["num_draft_tokens = 5", "num_steps + 1 = 4"]),
        ((2, 2, 8), ["num_draft_tokens = 8", "at most 7"]),  # 2 + (2 - 1) * 2**2 = 6 nodes and the root
        ((0, 2, 4), ["num_steps", "value 0", "at least 1"]),
    ],
)
def test_impossible_tree_is_refused_with_sglangs_constraint(
    tree: tuple[int, int, int], parts: list[str]
) -> None:
    keys = ("num_steps", "topk", "num_draft_tokens")
    message = refusal(("evaluate", "methods", 5, "tree"), dict(zip(keys, tree, strict=True)))
    assert "evaluate.methods.5.tree" in message
    for part in parts:
        assert part in message


def test_largest_possible_tree_is_taken() -> None:
    tree = {"num_steps": 2, "topk": 2, "num_draft_tokens": 7}
    method = parse_settings(changed(("evaluate", "methods", 5, "tree"), tree)).evaluate.methods[5]
    assert isinstance(method, HeadMethod)
    assert method.tree.shape.num_draft_tokens == 7


def test_missing_key_is_named() -> None:
    values = copy.deepcopy(DEFAULT)
    del values["train"]["lr"]
    with pytest.raises(SettingsError, match=r"train\.lr: this key is missing"):
        parse_settings(values)


def test_all_problems_are_shown_at_once() -> None:
    values = changed(("train", "lr"), "fast")
    values["vocabulary"]["size"] = 0
    with pytest.raises(SettingsError) as caught:
        parse_settings(values)
    assert len(str(caught.value).splitlines()) == 2


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(path=st.sampled_from(sorted(leaves(DEFAULT), key=str)), value=JSON_LIKE)
def test_any_value_anywhere_is_taken_or_refused_by_its_section(path: Path_, value: Any) -> None:
    """No input makes anything but Settings or a SettingsError, and the error names where it is."""
    try:
        settings = parse_settings(changed(path, value))
    except SettingsError as error:
        sections = {"regenerate": "train", "tasks": "evaluate", "drafts": "evaluate"}
        assert any(str(key) in str(error) for key in (path[0], sections.get(str(path[0]), path[0])))
    else:
        taken: Any = settings.model_dump(mode="json")
        for key in path:
            taken = taken[key]
        assert taken == json.loads(json.dumps(value))


@given(path=st.sampled_from(sorted(leaves(DEFAULT), key=str)), data=st.data())
def test_any_misspelt_key_is_refused_by_name(path: Path_, data: st.DataObject) -> None:
    key = str(path[-1])
    cut = data.draw(st.integers(0, len(key) - 1))
    misspelt = (*path[:-1], key[:cut] + "_" + key[cut:])
    assert ".".join(map(str, misspelt)) in refusal(misspelt, 1)


def test_names_of_methods_and_variants_may_hold_dots() -> None:
    """No key of dvc.yaml is made of them; an ablation of the default profile is named eagle3.1."""
    settings = parse_settings(changed(("evaluate", "methods", 5, "name"), "eagle3.1"))
    assert settings.evaluate.methods[5].name == "eagle3.1"
    assert "eagle3.1" in settings.studies.ablation.variants


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = parse_settings(DEFAULT)
    with pytest.raises(ValueError, match="frozen"):
        settings.train.lr = 1.0


def test_yaml_exponents_are_numbers_and_repeated_keys_are_refused(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as a text, and most readers take the last of two equal keys without a word."""
    path = tmp_path / "params.yaml"
    path.write_text("lr: 1e-3\n")
    assert read_yaml(path) == {"lr": 0.001}
    path.write_text("lr: 1\nlr: 2\n")
    with pytest.raises(SettingsError, match="duplicate key"):
        read_yaml(path)


@pytest.mark.parametrize("text", ["[1, 2]", "train: [", ""])
def test_what_is_not_a_parameter_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"params\.yaml"):
        load_settings(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(tmp_path / "params.yaml")


def test_default_profile_is_written_as_it_is(tmp_path: Path) -> None:
    write_profile("default", tmp_path / "params.yaml", PROFILES)
    assert (tmp_path / "params.yaml").read_text() == (PROFILES / "default.yaml").read_text()


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_written_profile_is_the_default_with_its_changes_and_comments(tmp_path: Path, name: str) -> None:
    write_profile(name, tmp_path / "params.yaml", PROFILES)
    assert read_yaml(tmp_path / "params.yaml") == read_profile(name, PROFILES)
    assert "# Evaluation tasks" in (tmp_path / "params.yaml").read_text()


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(
        SettingsError, match=r"choose from default, full, llama-2-7b, llama-3.1-8b, qwen3-8b, smoke"
    ):
        read_profile("ful", PROFILES)


def test_merge_replaces_lists_whole_and_keeps_the_base() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge(base, {"a": {"c": [9]}}) == {"a": {"b": 1, "c": [9]}, "d": 3}
    assert merge(base, {"a": None, "d": None}) == {"d": None}, "a mapping is taken out, a value becomes null"
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 3}


def test_flatten_numbers_lists_of_sections_only() -> None:
    values = {"a": {"b": [1, 2]}, "methods": [{"name": "x"}, {"name": "y"}], "none": []}
    assert flatten(values) == {"a.b": [1, 2], "methods.0.name": "x", "methods.1.name": "y", "none": []}


def test_every_setting_is_in_the_file() -> None:
    """No defaults hide in the code: what params.yaml shows is what a run depends on."""
    assert set(flatten(parse_settings(DEFAULT).model_dump(mode="json"))) == set(flatten(DEFAULT))
    assert all(field.is_required() for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("studies", "ablation", "draft"), "eagle", ["studies.ablation.draft", "'eagle'", "family eagle3"]),
        (
            ("studies", "ablation", "variants", "lk-loss"),
            {"loss": "mse"},
            ["studies.ablation.variants.lk-loss.loss", "drafts.eagle3"],
        ),
        (("studies", "ablation", "variants", "x"), {"los": "lk"}, ["variants.x.los", "drafts.eagle3"]),
        (("studies", "ablation", "variants", "eagle3"), {}, ["'eagle3'", "unchanged"]),
        (("studies", "scaling", "drafts"), ["small"], ["studies.scaling.drafts", "'small'"]),
        (("studies", "evaluate", "tasks"), ["chess"], ["studies.evaluate.tasks", "'chess'"]),
    ],
)
def test_studies_are_checked_before_anything_is_trained(path: Path_, value: Any, parts: list[str]) -> None:
    message = refusal(path, value)
    for part in parts:
        assert part in message
