import json
from pathlib import Path
from typing import Any

import pytest

from loader.adapters.config import LoraConfig, read_lora_config
from loader.errors import CheckpointError
from tests.support.tiny_adapter import ADAPTER_CONFIG


def read(folder: Path, **changes: Any) -> LoraConfig:
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **changes}))
    return read_lora_config(folder)


def refused(folder: Path, **changes: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(folder, **changes)
    assert caught.value.file == folder / "adapter_config.json"
    return caught.value


def test_what_it_says_is_read(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        r=16,
        lora_alpha=32.5,
        target_modules=["q_proj"],
        exclude_modules=".*",
        layers_to_transform=3,
        layers_pattern="layers",
        rank_pattern={"k_proj": 2},
        alpha_pattern={"k_proj": 3},
        modules_to_save=["lm_head"],
    )
    assert (config.rank, config.alpha, config.use_rslora) == (16, 32.5, False)
    assert (config.target_modules, config.exclude_modules) == (("q_proj",), ".*")
    assert (config.layers, config.layers_pattern) == (frozenset({3}), ("layers",))
    assert (config.rank_pattern, config.alpha_pattern) == ({"k_proj": 2}, {"k_proj": 3.0})
    assert config.modules_to_save == ("lm_head",)


def test_scaling_is_alpha_over_rank_or_over_its_root(tmp_path: Path) -> None:
    assert read(tmp_path).scaling(16, 8.0) == 0.5
    assert read(tmp_path, use_rslora=True).scaling(16, 8.0) == 2.0


def test_all_linear_is_told_from_an_expression(tmp_path: Path) -> None:
    assert read(tmp_path, target_modules="All-Linear").target_modules == "all-linear"
    assert read(tmp_path, target_modules=".*_proj").target_modules == ".*_proj"


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"target_parameters": ["mlp.experts.weight"]},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"trainable_token_indices": [1]},
        {"lora_bias": True},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"alora_invocation_tokens": [1]},
        {"arrow_config": {"top_k": 1}},
        {"kasa_config": {"beta": 1.0}},
        {"monteclora_config": {"num_samples": 2}},
        {"megatron_config": {"a": 1}},
        {"something_new": True},
    ],
)
def test_what_computes_something_else_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    error = refused(tmp_path, **changes)
    (name,) = changes
    assert (error.code, error.found) == ("unsupported", name)
    assert name in error.message
    assert "merge_and_unload" in error.remedy


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq"])
def test_what_was_trained_on_a_changed_base_is_refused_until_converted(tmp_path: Path, how: str) -> None:
    error = refused(tmp_path, init_lora_weights=how)
    assert (error.code, error.found) == ("unsupported", how)
    assert "path_initial_model_for_weight_conversion" in error.remedy


@pytest.mark.parametrize("how", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_what_leaves_the_base_as_it_is_is_accepted(tmp_path: Path, how: object) -> None:
    assert read(tmp_path, init_lora_weights=how).rank == 4


def test_another_kind_of_adapter_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, peft_type="IA3").code == "unsupported"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": None}, "r is missing"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"target_modules": None}, "target_modules names no module"),
        ({"target_modules": []}, "target_modules names no module"),
        ({"target_modules": ["q_proj", 1]}, "target_modules holds 1"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is"),
        ({"target_modules": "x" * 10_001}, "target_modules has 10001"),
        ({"target_modules": ".*", "layers_to_transform": [1]}, "layers_to_transform stands beside an expression"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform is"),
        ({"layers_pattern": ["(a"]}, "layers_pattern holds"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0"),
        ({"rank_pattern": [4]}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": "x"}}, "q_proj is 'x'"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is"),
        ({"modules_to_save": ["x"] * 257}, "modules_to_save is"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"init_lora_weights": 3}, "init_lora_weights is 3"),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    error = refused(tmp_path, **changes)
    assert error.code == "invalid"
    assert words in error.message
    assert error.remedy and error.expected and error.found


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_lora_config(tmp_path)
    assert (caught.value.code, caught.value.file) == ("not_found", tmp_path / "adapter_config.json")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_lora_config(tmp_path)
