import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.adapters.adapter import adapter_fingerprint, open_adapter
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.config import OtherModel
from loader.errors import CheckpointError
from tests.support.tiny_adapter import PREFIX, adapter_tensors, layer_modules, make_tiny_adapter, write_adapter
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama, write_safetensors

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
EMBEDDING = "model.embed_tokens"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., CheckpointError]:
    def check(base: Checkpoint, **options: Any) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            open_adapter(tmp_path / "a", base.config, **options)
        assert caught.value.message and caught.value.remedy
        return caught.value

    return check


def tensors_of(base: Checkpoint, rank: int = 4) -> dict[str, Any]:
    return adapter_tensors(base.config, dict.fromkeys(layer_modules(base.config, "q_proj", "down_proj"), rank))


def test_an_adapter_is_read_from_headers(tmp_path: Path, base: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_adapter(tmp_path / "a", base.config, dtype="bfloat16")
    file = path / "adapter_model.safetensors"
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    furthest, real = 0, os.pread

    def watched(descriptor: int, num_bytes: int, offset: int) -> bytes:
        nonlocal furthest
        if os.fstat(descriptor).st_size == file.stat().st_size:
            furthest = max(furthest, offset + num_bytes)
        return real(descriptor, num_bytes, offset)

    monkeypatch.setattr(os, "pread", watched)
    adapter = open_adapter(path, base.config)
    assert 0 < furthest <= header_bytes
    assert (adapter.max_rank, len(adapter.modules), adapter.full_weights) == (4, 4, {})
    module = adapter.modules[DOWN]
    assert (module.rank, module.scaling, module.a.shape, module.b.shape) == (4, 2.0, (4, 128), (64, 4))
    assert adapter.total_bytes == 2 * 4 * 2 * ((64 + 64) + (128 + 64))


def test_names_as_they_are_in_memory_are_understood(tmp_path: Path, base: Checkpoint) -> None:
    old = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors_of(base).items()}
    adapter = open_adapter(write_adapter(tmp_path / "a", old), base.config)
    assert adapter.modules[Q].a.name == f"{PREFIX}{Q}.lora_A.default.weight"


@pytest.mark.parametrize("limit", [3, 4])
def test_a_rank_above_the_limit_is_refused(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError], limit: int
) -> None:
    path = make_tiny_adapter(tmp_path / "a", base.config)
    if limit == 4:
        assert open_adapter(path, base.config, max_rank=limit).max_rank == 4
        return
    error = refused(base, max_rank=limit)
    assert (error.code, error.expected, error.found) == ("unsupported", "at most 3", "4")


@pytest.mark.parametrize(
    ("shape", "expected", "words"),
    [((4, 65), "[4, 64]", "base model that the adapter"), ((3, 64), "[4, 64]", "rank_pattern")],
)
def test_a_factor_of_another_shape_names_the_module_and_both_shapes(
    tmp_path: Path,
    base: Checkpoint,
    refused: Callable[..., CheckpointError],
    shape: tuple[int, int],
    expected: str,
    words: str,
) -> None:
    name = f"{PREFIX}{Q}.lora_A.weight"
    write_adapter(tmp_path / "a", {**tensors_of(base), name: np.zeros(shape, np.float32)})
    error = refused(base)
    assert (error.code, error.tensor, error.expected) == ("invalid", name, expected)
    assert Q in error.message and str(list(shape)) in error.message
    assert words in error.remedy


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_factor_that_is_missing_is_named(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError], part: str
) -> None:
    tensors = tensors_of(base)
    name = f"{PREFIX}{DOWN}.{part}.weight"
    del tensors[name]
    write_adapter(tmp_path / "a", tensors)
    error = refused(base)
    assert (error.code, error.tensor, error.found) == ("invalid", name, "nothing")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.2.mlp.down_proj.lora_A.weight", "which the base model does not have"),
        ("model.layers.0.mlp.up_proj.lora_A.weight", "which target_modules of the config does not"),
        ("model.layers.0.mlp.up_proj.weight", "which modules_to_save does not name"),
        ("model.layers.0.mlp.up_proj.base_layer.weight", "which modules_to_save does not name"),
    ],
)
def test_a_tensor_without_use_is_refused(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError], name: str, words: str
) -> None:
    write_adapter(tmp_path / "a", {**tensors_of(base), PREFIX + name: np.zeros((4, 4), np.float32)})
    error = refused(base)
    assert (error.code, error.tensor) == ("invalid", PREFIX + name)
    assert words in error.message


def test_modules_that_are_saved_whole_must_be_there_and_in_shape(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError]
) -> None:
    options = {"modules_to_save": ["lm_head", "model.norm"]}
    head, norm = np.zeros((320, 64), np.float32), np.ones(64, np.float32)
    whole = {**tensors_of(base), f"{PREFIX}lm_head.weight": head, f"{PREFIX}model.norm.weight": norm}
    adapter = open_adapter(write_adapter(tmp_path / "a", whole, **options), base.config)
    assert adapter.full_weights.keys() == {"lm_head.weight", "model.norm.weight"}
    del whole[f"{PREFIX}model.norm.weight"]
    write_adapter(tmp_path / "a", whole, **options)
    assert refused(base).tensor == f"{PREFIX}model.norm.weight"
    write_adapter(tmp_path / "a", tensors_of(base), modules_to_save=["score"])
    assert "modules_to_save names 'score'" in refused(base).message


@pytest.mark.parametrize("part", ["weight", "base_layer.weight"])
def test_an_embedding_of_a_resized_vocabulary_is_refused(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError], part: str
) -> None:
    resized = {**tensors_of(base), f"{PREFIX}{EMBEDDING}.{part}": np.zeros((328, 64), np.float32)}
    write_adapter(tmp_path / "a", resized)
    error = refused(base)
    assert (error.expected, error.found) == ("[320, 64]", "F32 [328, 64]")
    assert "resize the base model's likewise" in error.remedy


def test_the_biases_of_saved_modules_are_part_of_them(tmp_path: Path) -> None:
    config = open_checkpoint(make_tiny_llama(tmp_path / "base", config_overrides=TINY_FAMILIES["qwen2"])).config
    ranks = dict.fromkeys(layer_modules(config, "down_proj"), 4)
    weight, bias = np.zeros((32, 64), np.float32), np.zeros(32, np.float32)
    saved = {f"{PREFIX}model.layers.0.self_attn.k_proj.{part}": t for part, t in (("weight", weight), ("bias", bias))}
    tensors = {**adapter_tensors(config, ranks), **saved}
    options = {"target_modules": ["down_proj"], "modules_to_save": ["layers.0.self_attn.k_proj"]}
    adapter = open_adapter(write_adapter(tmp_path / "a", tensors, **options), config)
    assert [name.rpartition(".")[2] for name in adapter.full_weights] == ["weight", "bias"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_trained_biases_are_refused_where_the_base_has_some(tmp_path: Path, family: str) -> None:
    config = open_checkpoint(make_tiny_llama(tmp_path / "base", config_overrides=TINY_FAMILIES[family])).config
    path = make_tiny_adapter(tmp_path / "a", config, bias="all")
    if family == "llama":
        assert len(open_adapter(path, config).modules) == 4
        return
    with pytest.raises(CheckpointError, match="own biases"):
        open_adapter(path, config)


@pytest.mark.parametrize(
    ("extra", "changes"),
    [
        (f"{EMBEDDING}.weight", {"modules_to_save": ["embed_tokens"]}),
        (f"{EMBEDDING}.weight", {}),
        ("lm_head.weight", {"modules_to_save": ["lm_head"]}),
        ("lm_head.base_layer.weight", {}),
    ],
)
def test_a_weight_for_half_of_a_shared_one_is_refused(
    tmp_path: Path, tied: Checkpoint, refused: Callable[..., CheckpointError], extra: str, changes: dict[str, Any]
) -> None:
    write_adapter(tmp_path / "a", {**tensors_of(tied), PREFIX + extra: np.zeros((320, 64), np.float32)}, **changes)
    error = refused(tied)
    assert error.code == "unsupported"
    assert "embedding is also its head" in error.message


def test_factors_that_are_tied_are_refused_where_embedding_and_head_are(
    tmp_path: Path, tied: Checkpoint, base: Checkpoint, refused: Callable[..., CheckpointError]
) -> None:
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    path = write_adapter(tmp_path / "a", adapter_tensors(base.config, {EMBEDDING: 4}), **options)
    assert open_adapter(path, base.config).modules.keys() == {EMBEDDING}
    assert "ensure_weight_tying" in refused(tied).message


def test_a_model_whose_modules_are_not_known_takes_no_adapter(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError]
) -> None:
    make_tiny_adapter(tmp_path / "a", base.config)
    other = OtherModel({}, {"transformer.h.0.attn.weight": (4, 4)})
    unknown = dataclasses.replace(base, config=dataclasses.replace(base.config, other=other))
    error = refused(unknown)
    assert (error.code, error.found) == ("unsupported", base.config.architecture)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError]
) -> None:
    path = make_tiny_adapter(tmp_path / "a", base.config)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    error = refused(base)
    assert (error.code, error.file) == ("unsupported", path / "adapter_model.bin")
    assert "weights_only=True" in error.remedy
    (path / "adapter_model.bin").unlink()
    assert (refused(base).code, refused(base).file) == ("not_found", path / "adapter_model.safetensors")


def test_what_is_no_directory_is_refused(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError]
) -> None:
    assert refused(base).code == "not_found"
    (tmp_path / "a").write_text("")
    assert refused(base).code == "invalid"


@pytest.mark.parametrize("damage", ["truncated", "integers"])
def test_damaged_weights_are_refused(
    tmp_path: Path, base: Checkpoint, refused: Callable[..., CheckpointError], damage: str
) -> None:
    file = make_tiny_adapter(tmp_path / "a", base.config) / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-8] if damage == "truncated" else data.replace(b'"F32"', b'"I32"'))
    error = refused(base)
    assert (error.code, error.file) == ("invalid", file)


def test_the_fingerprint_names_config_and_weights(tmp_path: Path, base: Checkpoint) -> None:
    path = make_tiny_adapter(tmp_path / "a", base.config)
    one = adapter_fingerprint(open_adapter(path, base.config))
    copy = adapter_fingerprint(open_adapter(make_tiny_adapter(tmp_path / "b", base.config), base.config))
    assert one == copy
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 9}))
    assert adapter_fingerprint(open_adapter(path, base.config)) != one
    tensors = tensors_of(base)
    tensors[f"{PREFIX}{DOWN}.lora_B.weight"][63, 3] += 1
    write_safetensors(tmp_path / "b" / "adapter_model.safetensors", tensors)
    assert adapter_fingerprint(open_adapter(tmp_path / "b", base.config)) != one
