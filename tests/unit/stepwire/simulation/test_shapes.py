from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from stepwire.simulation.shapes import SHAPES, find_shape, shape_of_checkpoint, shape_of_config
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama


def test_the_parameters_of_known_models_are_those_that_their_makers_say() -> None:
    def billions(name: str) -> float:
        return (SHAPES[name].layer_parameters + SHAPES[name].head_parameters) / 1e9

    # The embedding table is not counted: 0.53 of the 8.03 billion, 1.05 of the 70.6.
    assert billions("llama-3.1-8b") == pytest.approx(8.03 - 0.53, rel=0.01)
    assert billions("llama-3.1-70b") == pytest.approx(70.6 - 1.05, rel=0.01)
    assert billions("smollm2-135m") == pytest.approx(0.1345, rel=0.01)
    assert SHAPES["llama-3.1-8b"].kv_bytes_per_token == 131_072


def test_a_checkpoints_shape_counts_the_tensors_it_has(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, tie=True))
    shape = shape_of_checkpoint(checkpoint, "float32")

    def size(name: str) -> int:
        product = 1
        for length in checkpoint.tensors[name].shape:
            product *= length
        return product

    layers = sum(size(name) for name in checkpoint.tensors if name.startswith("model.layers."))
    assert shape.layer_parameters == layers
    assert shape.head_parameters == size("model.embed_tokens.weight")
    assert shape.weight_bytes == 4 * (shape.layer_parameters + shape.head_parameters)
    config = checkpoint.config
    assert shape.kv_bytes_per_token == 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert find_shape(str(checkpoint.path), "float32") == shape


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_of_experts_a_token_goes_through_a_few(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, config_overrides=TINY_FAMILIES[family]))
    shape, experts = shape_of_checkpoint(checkpoint, "float32"), checkpoint.config.experts
    assert experts is not None
    sizes = {name: info.num_bytes // 4 for name, info in checkpoint.tensors.items() if name.startswith("model.layers.")}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    of_head_norms = sum(size for name, size in sizes.items() if name.endswith(("q_norm.weight", "k_norm.weight")))
    rest = sum(sizes.values()) - of_experts - of_head_norms
    assert shape.layer_parameters == rest + of_experts * experts.num_chosen // experts.num_experts
    assert shape.weight_bytes == 4 * (rest + of_experts + shape.head_parameters)


def test_unknown_models_and_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        find_shape(str(tmp_path / "nothing"))
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, tie=True))
    with pytest.raises(ValueError, match="int8"):
        shape_of_config(checkpoint.config, "int8")


def test_a_known_name_needs_no_file() -> None:
    assert find_shape("Llama-3.1-8B") is SHAPES["llama-3.1-8b"]
