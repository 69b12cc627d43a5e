"""What headers settle of a quantisation: writers differ in what they store of one scheme."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.needs import rank_needs
from loader.quantised.load import load_rank
from loader.quantised.schemes import GptqScheme, GridScheme, PackScheme
from loader.shares import RankPlace
from tests.support.tiny_quantised import Tensor, write_tensors
from tests.support.tiny_quantised_models import (
    Format,
    awq,
    change_config,
    float_quantized,
    fp8_blocks,
    fp8_tensor,
    gptq,
    int8,
    make_tiny_quantised,
    pack_quantized,
    stored_tensors,
)

LAYER = "model.layers.0.mlp.down_proj"
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq_3_bit": gptq(3, symmetric=False),
    "gptq_ordered": gptq(act_order=True),
    "awq": awq(),
    "packed": pack_quantized(symmetric=False),
    "packed_ordered": pack_quantized(act_order=True),
    "w8a8": int8(BY_TOKEN),
    "fp8_blocks": fp8_blocks(),
    "fp8_tensor": fp8_tensor(),
    "fp8_static": fp8_tensor((1,), input_scale=0.25),
    "fp8_channel": float_quantized(),
}


def load(folder: Path, place: RankPlace) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    return load_rank(checkpoint, place, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_rank_holds_is_told_before_it_loads(tmp_path: Path, name: str) -> None:
    folder = make_tiny_quantised(tmp_path, FORMATS[name], num_layers=1)
    for place in (RankPlace(), RankPlace(0, 2), RankPlace(3, 4)):
        needs = rank_needs(open_checkpoint(folder), place, "float32")
        tensors = load(folder, place)
        assert needs.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert needs.host_peak_bytes > needs.resident_bytes


@pytest.mark.parametrize("name", ["gptq", "awq", "packed"])
def test_four_bits_take_a_third_of_sixteen(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 1}
    folder = make_tiny_quantised(tmp_path, FORMATS[name], **sizes)
    tensors = load(folder, RankPlace())
    taken = sum(tensor.nbytes for part, tensor in tensors.items() if "_proj." in part)
    products = open_checkpoint(folder).config.quantisation
    assert products is not None
    whole = 2 * sum(
        tensors[f"{product}.scales"].shape[0] * (512 if "down" in product else 256) for product in products.schemes
    )
    assert taken / whole <= 0.35


def scheme_of(folder: Path) -> object:
    quantisation = open_checkpoint(folder).config.quantisation
    assert quantisation is not None
    return quantisation.schemes[LAYER]


def test_an_index_is_read_where_there_is_one(tmp_path: Path) -> None:
    make_tiny_quantised(tmp_path, gptq())
    found = scheme_of(tmp_path)
    assert isinstance(found, GptqScheme)
    assert found.has_g_idx
    tensors = {name: tensor for name, tensor in stored_tensors(tmp_path).items() if not name.endswith("g_idx")}
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = scheme_of(tmp_path)
    assert isinstance(found, GptqScheme)
    assert not found.has_g_idx


def test_a_shape_is_read_where_there_is_one(tmp_path: Path) -> None:
    make_tiny_quantised(tmp_path, pack_quantized())
    tensors = {name: tensor for name, tensor in stored_tensors(tmp_path).items() if not name.endswith("_shape")}
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = scheme_of(tmp_path)
    assert isinstance(found, PackScheme)
    assert not found.has_shape
    assert load(tmp_path, RankPlace())


@pytest.mark.parametrize("scale_name", ["weight_scale", "weight_scale_inv"])
def test_a_scale_of_fp8_has_either_name(tmp_path: Path, scale_name: str) -> None:
    make_tiny_quantised(tmp_path, fp8_tensor())
    tensors = stored_tensors(tmp_path)
    tensors = {name.replace("weight_scale", scale_name): tensor for name, tensor in tensors.items()}
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = scheme_of(tmp_path)
    assert isinstance(found, GridScheme)
    assert (found.scale_name, found.scale_rank) == (scale_name, 0)


@pytest.mark.parametrize("flat", [True, False])
def test_native_fp8_with_a_scale_a_row(tmp_path: Path, flat: bool) -> None:
    make_tiny_quantised(tmp_path, float_quantized())
    change_config(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    if flat:
        tensors = {
            name: Tensor(tensor.dtype, tensor.array.reshape(-1)) if name.endswith("weight_scale") else tensor
            for name, tensor in stored_tensors(tmp_path).items()
        }
        write_tensors(tmp_path / "model.safetensors", tensors)
    found = scheme_of(tmp_path)
    assert isinstance(found, GridScheme)
    assert (found.block_rows, found.block_columns, found.scale_rank) == (1, 0, 1 if flat else 2)
    assert load(tmp_path, RankPlace(1, 2))


def test_a_weight_stored_as_it_is_is_read_as_it_is(tmp_path: Path) -> None:
    make_tiny_quantised(tmp_path, gptq())
    tensors = {name: tensor for name, tensor in stored_tensors(tmp_path).items() if not name.startswith(f"{LAYER}.")}
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    write_tensors(tmp_path / "model.safetensors", {**tensors, f"{LAYER}.weight": Tensor("F32", weight)})
    assert torch.equal(load(tmp_path, RankPlace())[f"{LAYER}.weight"], torch.from_numpy(weight))


def test_a_bias_that_old_writers_store_beside_every_weight(tmp_path: Path) -> None:
    make_tiny_quantised(tmp_path, gptq())
    bias = Tensor("F16", np.arange(64) / 8)
    write_tensors(tmp_path / "model.safetensors", {**stored_tensors(tmp_path), f"{LAYER}.bias": bias})
    name = f"{LAYER}.bias"
    assert load(tmp_path, RankPlace())[name].tolist() == bias.array.tolist()
    # Of a product that is split by its inputs one rank adds it.
    assert [name in load(tmp_path, RankPlace(rank, 2)) for rank in range(2)] == [True, False]


@pytest.mark.parametrize("file_name", ["quantize_config.json", "quant_config.json"])
def test_settings_in_a_file_of_their_own(tmp_path: Path, file_name: str) -> None:
    form = gptq() if file_name == "quantize_config.json" else awq()
    make_tiny_quantised(tmp_path, form)
    change_config(tmp_path, quantization_config=None)
    before = open_checkpoint_fails(tmp_path)
    assert "quantization_config" in before.remedy
    content = {name: value for name, value in form.config.items() if name != "quant_method"}
    (tmp_path / file_name).write_text(json.dumps(content))
    first = open_checkpoint(tmp_path)
    assert first.config.quantisation is not None
    (tmp_path / file_name).write_text(json.dumps({**content, "note": 1}))
    assert open_checkpoint(tmp_path).fingerprint != first.fingerprint


def test_settings_nested_as_old_writers_do(tmp_path: Path) -> None:
    form = int8()
    make_tiny_quantised(tmp_path, form)
    change_config(tmp_path, quantization_config=None, compression_config={"quantization_config": form.config})
    assert scheme_of(tmp_path) == GridScheme("I8", 1, 0)


def open_checkpoint_fails(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return caught.value


@pytest.mark.parametrize("value", ["gptq", [1], 7])
def test_settings_that_are_no_table(tmp_path: Path, value: Any) -> None:
    make_tiny_quantised(tmp_path, gptq())
    change_config(tmp_path, quantization_config=value)
    assert open_checkpoint_fails(tmp_path).code == "invalid"


def test_sizes_that_do_not_fill_words(tmp_path: Path) -> None:
    make_tiny_quantised(tmp_path, gptq(group_size=-1), intermediate_size=128)
    change_config(tmp_path, intermediate_size=100, quantization_config={**gptq(3, group_size=-1).config})
    error = open_checkpoint_fails(tmp_path)
    assert (error.code, error.found) == ("invalid", "100")


@pytest.mark.parametrize(("part", "dtype"), [("qweight", "F32"), ("scales", "I32"), ("g_idx", "I64")])
def test_a_part_of_another_type(tmp_path: Path, part: str, dtype: str) -> None:
    make_tiny_quantised(tmp_path, gptq())
    tensors = stored_tensors(tmp_path)
    tensors[f"{LAYER}.{part}"] = Tensor(dtype, tensors[f"{LAYER}.{part}"].array)
    write_tensors(tmp_path / "model.safetensors", tensors)
    error = open_checkpoint_fails(tmp_path)
    assert (error.code, error.tensor, error.found) == ("invalid", f"{LAYER}.{part}", dtype)


@pytest.mark.parametrize("form", [gptq(), fp8_blocks()], ids=["gptq", "fp8"])
def test_layers_that_only_speculation_uses_are_passed_over(tmp_path: Path, form: Format) -> None:
    make_tiny_quantised(tmp_path, form)
    extra = {
        name.replace("layers.0", "layers.2"): tensor
        for name, tensor in stored_tensors(tmp_path).items()
        if "layers.0" in name
    }
    write_tensors(tmp_path / "model.safetensors", {**stored_tensors(tmp_path), **extra})
    assert "layers.2" in str(open_checkpoint_fails(tmp_path).tensor)
    change_config(tmp_path, num_nextn_predict_layers=1)
    assert not any("layers.2" in name for name in load(tmp_path, RankPlace()))


def test_an_output_layer_may_be_quantised(tmp_path: Path) -> None:
    form = gptq(lm_head=True)
    make_tiny_quantised(tmp_path, form)
    assert "lm_head.words" in load(tmp_path, RankPlace())
    change_config(tmp_path, quantization_config={**form.config, "lm_head": False})
    assert open_checkpoint_fails(tmp_path).tensor == "lm_head.weight"
