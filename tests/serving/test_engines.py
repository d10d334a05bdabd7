"""Command lines: names that the engines take today, old ones translated, contradictions refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from eagle3.serving.engines import (
    Engine,
    Service,
    Speculation,
    as_flags,
    command,
    speculative_flags,
    translate,
)

TREE = Speculation("eagle3", Path("models/drafts/eagle3"), 2, 3, 6)
CHAIN = Speculation("eagle", Path("models/drafts/eagle"), 3, 1, 4)
TARGET = Path("models/target")


def test_sglang_is_told_all_of_the_tree_together() -> None:
    words = command("sglang", Path("python"), Service(TARGET, "bfloat16", TREE), "127.0.0.1", 30000, {})
    text = " ".join(words)
    assert text.startswith("python -m sglang.launch_server --model-path models/target --dtype bfloat16")
    assert (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path models/drafts/eagle3 "
        "--speculative-num-steps 2 --speculative-eagle-topk 3 --speculative-num-draft-tokens 6" in text
    )
    assert "--host 127.0.0.1 --port 30000" in text
    assert "--enable-torch-compile" not in text


def test_flags_ready_to_paste_name_the_algorithm_by_the_family() -> None:
    assert speculative_flags("sglang", CHAIN) == (
        "--speculative-algorithm EAGLE --speculative-draft-model-path models/drafts/eagle "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )


def test_flags_of_vllm_survive_a_shell() -> None:
    flag, config = shlex.split(speculative_flags("vllm", CHAIN))
    assert flag == "--speculative-config"
    assert json.loads(config)["num_speculative_tokens"] == 3


def test_vanilla_has_no_speculative_option() -> None:
    engines: tuple[Engine, ...] = ("sglang", "vllm")
    for engine in engines:
        words = command(engine, Path("python"), Service(TARGET, "float32"), "h", 1, {})
        assert not any("speculative" in word for word in words)


def test_vllm_takes_the_chain_as_json_and_compiles_where_it_is_asked() -> None:
    chain = Speculation("eagle3", Path("models/drafts/eagle3"), 3, 1, 4)
    words = command("vllm", Path("python"), Service(TARGET, "float32", chain, compiled=True), "h", 1, {})
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "models/drafts/eagle3", "num_speculative_tokens": 3}
    assert "--enforce-eager" not in words
    assert words[words.index("--per-request-spec-decode-metrics") + 1] == "detailed"
    assert "--enforce-eager" in command("vllm", Path("python"), Service(TARGET, "float32"), "h", 1, {})
    itself = Service(TARGET, "float32", compiled=None)
    assert "--enforce-eager" not in command("vllm", Path("python"), itself, "h", 1, {})
    assert "--enable-torch-compile" not in command("sglang", Path("python"), itself, "h", 1, {})


def test_vllm_refuses_a_tree_and_an_eagle_draft_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="chains only, and topk 3"):
        command("vllm", Path("python"), Service(TARGET, "float32", TREE), "h", 1, {})
    with pytest.raises(ValueError, match="no bias in fc"):
        command("vllm", Path("python"), Service(TARGET, "float32", CHAIN), "h", 1, {})


def test_a_draft_that_an_engine_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    """Neither says anything of it: such a draft is accepted less."""

    def words(engine: Engine, **values: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(values))
        draft = Speculation("eagle3", tmp_path, 3, 1, 4)
        return command(engine, Path("python"), Service(TARGET, "float32", draft), "h", 1, {})

    with pytest.raises(ValueError, match="norm_before_residual is true, which SGLang ignores"):
        words("sglang", norm_before_residual=True)
    assert words("vllm", norm_before_residual=True)
    engines: tuple[Engine, ...] = ("sglang", "vllm")
    for engine in engines:
        with pytest.raises(ValueError, match="reads the final state alone"):
            words(engine, eagle_config={"use_aux_hidden_state": False})
        assert words(engine, eagle_config={"use_aux_hidden_state": True})


def test_a_draft_of_the_last_layers_output_is_refused(tmp_path: Path) -> None:
    """transformers' last state is the normed one, which this project reads; the engines hand over another."""
    folder, target = tmp_path / "draft", tmp_path / "target"
    folder.mkdir()
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 30}))
    engines: tuple[Engine, ...] = ("sglang", "vllm")
    for layers, fits in (([15, 22, 29], True), ([15, 22, 30], False)):
        (folder / "config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": layers}))
        service = Service(target, "float32", Speculation("eagle3", folder, 3, 1, 4))
        for engine in engines:
            if fits:
                assert command(engine, Path("python"), service, "h", 1, {})
            else:
                with pytest.raises(ValueError, match="output of the target's last layer"):
                    command(engine, Path("python"), service, "h", 1, {})


def test_vllm_switches_are_turned_off_by_their_negation() -> None:
    off = {"enable-prefix-caching": False}
    assert "--no-enable-prefix-caching" in command("vllm", Path("p"), Service(TARGET, "float32"), "h", 1, off)
    words = command("sglang", Path("p"), Service(TARGET, "float32"), "h", 1, {"disable-radix-cache": False})
    assert not any("radix" in word for word in words)


def test_pieces_that_are_no_whole_answers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"options\.incremental-streaming-output: every piece"):
        command(
            "sglang",
            Path("python"),
            Service(TARGET, "float32"),
            "h",
            1,
            {"incremental-streaming-output": True},
        )


def test_options_that_follow_from_the_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"serving\.sglang\.options\.port"):
        command("sglang", Path("python"), Service(TARGET, "float32"), "h", 1, {"port": 5})


def test_the_drafts_older_name_is_refused_as_it_was_given() -> None:
    options = translate("sglang", {"speculative_draft_model": "x"}, pytest.fail)
    with pytest.raises(ValueError, match=r"serving\.sglang\.options\.speculative-draft-model: follows"):
        command("sglang", Path("python"), Service(TARGET, "float32"), "h", 1, options)


def test_old_names_are_translated_with_a_warning() -> None:
    said: list[str] = []
    options = {"--cuda_graph_max_bs": 8, "disable-cuda-graph": True, "mem-fraction-static": 0.5}
    assert translate("sglang", options, said.append) == {
        "cuda-graph-max-bs-decode": 8,
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "mem-fraction-static": 0.5,
    }
    assert len(said) == 2
    assert "cuda-graph-max-bs-decode" in said[0]
    assert translate("sglang", {"disable-cuda-graph": False}, said.append) == {}


def test_flags_of_every_kind() -> None:
    options = {"a": 1, "b": True, "c": False, "d": None, "e": (1, 2), "f": "x"}
    assert as_flags(options) == ["--a", "1", "--b", "--e", "1", "2", "--f", "x"]
