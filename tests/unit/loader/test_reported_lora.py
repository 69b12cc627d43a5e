"""Adapters that people reported other engines to ignore, to scale wrongly, or to mix up; each under its number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.adapters.adapter import open_adapter
from loader.adapters.load import load_adapter
from loader.adapters.merge import merge_adapter
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_adapter import adapter_tensors, layer_modules, make_tiny_adapter, write_adapter
from tests.support.tiny_checkpoint import make_tiny_llama

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_llama(tmp_path / "base"))


def refused(path: Path, base: Checkpoint, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_adapter(path, base.config, **options)
    assert caught.value.file is not None and caught.value.remedy
    return caught.value


def test_vllm_2847_rank_above_the_limit(tmp_path: Path, base: Checkpoint) -> None:
    path = make_tiny_adapter(tmp_path / "a", base.config, rank=64)
    error = refused(path, base, max_rank=16)
    assert (error.code, error.expected, error.found) == ("unsupported", "at most 16", "64")
    assert Q in error.message
    # A pattern that asks for more than r counts too.
    ranks = {name: 32 if "down_proj" in name else 4 for name in layer_modules(base.config, "q_proj", "down_proj")}
    patterned = write_adapter(tmp_path / "b", adapter_tensors(base.config, ranks), rank_pattern={"down_proj": 32})
    assert refused(patterned, base, max_rank=16).found == "32"


def test_vllm_34186_55193_and_48019_no_module_matches(tmp_path: Path, base: Checkpoint) -> None:
    """Neither by the config's names, nor by the tensors', nor as an adapter without factors."""
    tensors = adapter_tensors(base.config, dict.fromkeys(layer_modules(base.config, "q_proj", "down_proj"), 4))
    error = refused(write_adapter(tmp_path / "a", tensors, target_modules=["query_key_value"]), base)
    assert (error.code, error.found) == ("invalid", "query_key_value")
    assert "change nothing" in error.message and "q_proj" in str(error.expected)
    renamed = {name.replace("model.layers", "language_model.layers"): tensor for name, tensor in tensors.items()}
    assert "has no lora_A.weight" in refused(write_adapter(tmp_path / "b", renamed), base).message
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    assert "base_model.model." in refused(write_adapter(tmp_path / "c", bare), base).message
    assert refused(write_adapter(tmp_path / "d", {}), base).found == "nothing"


@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_10798_and_55545_and_tensorrt_llm_1668_rslora_scale(tmp_path: Path, base: Checkpoint, tp: int) -> None:
    """alpha over the root of the rank, of each module's own rank."""
    ranks = {name: 16 if "down_proj" in name else 4 for name in layer_modules(base.config, "q_proj", "down_proj")}
    tensors = adapter_tensors(base.config, ranks)
    path = write_adapter(tmp_path / "a", tensors, use_rslora=True, rank_pattern={"down_proj": 16})
    adapter = open_adapter(path, base.config)
    for rank in range(tp):
        place = RankPlace(rank, tp)
        wanted = weight_slices(base.config, place)
        load = {"dtype": torch.float32, "progress": lambda _: None, "cancelled": lambda: False}
        plain, merged = load_weights(base, wanted, **load), load_weights(base, wanted, **load)
        merge_adapter(merged, load_adapter(adapter, place))
        for module, scale in ((Q, 8 / 2), ("model.layers.1.mlp.down_proj", 8 / 4)):
            a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
            change = torch.from_numpy(np.asarray(scale * b.astype(np.float64) @ a))
            part = torch.tensor_split(change, tp, dim=0 if module == Q else 1)[rank]
            name = f"{module}.weight"
            torch.testing.assert_close(merged[name] - plain[name], part.float(), rtol=1e-4, atol=1e-5)


def test_vllm_42125_same_name_with_other_content_is_another_adapter(tmp_path: Path, base: Checkpoint) -> None:
    """What keys the prefix cache is the content: neither path, nor size, nor time tell these two apart."""
    path = tmp_path / "a"
    fingerprints = []
    for seed in (1, 2, 1):
        make_tiny_adapter(path, base.config, seed=seed)
        fingerprints.append(load_adapter(open_adapter(path, base.config), RankPlace()).fingerprint)
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
