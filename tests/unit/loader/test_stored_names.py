"""Fused and renamed tensors, against the bytes that they are."""

from pathlib import Path

import pytest

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.layout import expected_tensors
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama


def opened(folder: Path, family: str, **arguments: int) -> Checkpoint:
    return open_checkpoint(make_tiny_llama(folder, config_overrides=TINY_FAMILIES[family], **arguments))


@pytest.mark.parametrize("family", ["phi3", "mixtral"])
def test_each_tensor_is_found_once_and_the_bytes_are_all_of_the_file(tmp_path: Path, family: str) -> None:
    checkpoint = opened(tmp_path, family)
    assert checkpoint.tensors.keys() == expected_tensors(checkpoint.config).keys()
    places = sorted((info.offset, info.offset + info.num_bytes) for info in checkpoint.tensors.values())
    assert [start for start, _ in places[1:]] == [stop for _, stop in places[:-1]]
    assert places[-1][1] == (tmp_path / "model.safetensors").stat().st_size


def test_fused_tensors_are_cut_at_rows(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, "phi3", head_dim=16, heads=4, kv_heads=2, hidden_size=64, intermediate_size=96)
    query, key, value, up = (
        checkpoint.tensors[f"model.layers.1.{name}_proj.weight"]
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.up")
    )
    assert (query.shape, key.shape, value.shape, up.shape) == ((64, 64), (32, 64), (32, 64), (96, 64))
    assert (key.offset - query.offset, value.offset - key.offset) == (64 * 64 * 4, 32 * 64 * 4)
    assert {info.stored_name for info in (query, key, value)} == {"model.layers.1.self_attn.qkv_proj.weight"}


def test_experts_have_the_names_of_all_gated_products(tmp_path: Path) -> None:
    info = opened(tmp_path, "mixtral").tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    assert info.stored_name == "model.layers.0.block_sparse_moe.experts.3.w3.weight"


def test_a_fused_tensor_of_other_rows_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "phi3")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_key_value_heads": 2', '"num_key_value_heads": 4'))
    with pytest.raises(CheckpointError, match="qkv_proj") as refused:
        open_checkpoint(tmp_path)
    assert (refused.value.code, refused.value.expected) == ("invalid", "[192, 64]")
