"""Quantised checkpoints and adapters that others were reported to load into wrong output, or into a crash.

Each loads right, on every rank, or is refused as what it is, with and without the config that names it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.layout import Linear, parameters
from loader.quantised.load import load_rank
from loader.quantised.packed import take_packed
from loader.shares import RankPlace
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_quantised import Tensor, write_tensors
from tests.support.tiny_quantised_models import (
    Format,
    change_config,
    fp8_blocks,
    fp8_tensor,
    gptq,
    int8,
    make_tiny_quantised,
    pack_quantized,
    stored_tensors,
)

LAYER = "model.layers.0.mlp.down_proj"
GPTQ = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}
AWQ = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
FP8_BLOCK = {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}
PACKED = {"weight_packed": torch.int32, "weight_scale": torch.float16, "weight_shape": torch.int64}
BITSANDBYTES = {"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32}

# 7 groups of 16 inputs, as in a model of 896 and groups of 128; 9 blocks in the 144 inner features.
ODD = {"hidden_size": 112, "intermediate_size": 144}
LOADS: Mapping[str, tuple[Format, dict[str, Any]]] = {
    "vllm_26343_gptq_v2": (gptq(version=2, symmetric=False), {}),
    "vllm_7374_desc_act": (gptq(act_order=True), {}),
    "vllm_5675_and_21695_odd_number_of_groups": (gptq(group_size=48), {"intermediate_size": 144}),
    "auto_round_643_odd_number_of_groups": (gptq(group_size=16), ODD),
    "sglang_3345_and_vllm_52997_fp8_blocks": (fp8_blocks(16), ODD),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", LOADS)
def test_loads_right_on_every_rank(tmp_path: Path, case: str, size: int) -> None:
    form, sizes = LOADS[case]
    dense = tmp_path / "dense"
    check_ranks(make_tiny_quantised(tmp_path / "quantised", form, dense=dense, num_layers=1, **sizes), dense, size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("version", [1, 2])
def test_vllm_38966_gptq_whose_config_says_the_other_version(tmp_path: Path, version: int, size: int) -> None:
    dense = tmp_path / "dense"
    folder = make_tiny_quantised(tmp_path / "quantised", gptq(version=version), dense=dense, num_layers=1)
    other = {1: "gptq_v2", 2: "gptq"}[version]
    change_config(folder, quantization_config={**gptq().config, "checkpoint_format": other})
    check_ranks(folder, dense, size)


def check_ranks(folder: Path, dense: Path, size: int) -> None:
    """Every product of every rank is the part that it should be of what the checkpoint stands for."""
    checkpoint = open_checkpoint(folder)
    whole = load_file(dense / "model.safetensors")
    for rank in range(size):
        place = RankPlace(rank, size)
        tensors = load_rank(checkpoint, place, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)
        for part in parameters(checkpoint.config, place):
            if isinstance(part, Linear) and part.scheme is not None:
                packed = take_packed(part.name, tensors)
                assert packed is not None
                expected = whole[f"{part.name}.weight"]
                expected = expected[part.outputs.start : part.outputs.stop, part.inputs.start : part.inputs.stop]
                assert torch.equal(packed.dequantise(), expected), (part.name, rank)


REFUSED: Mapping[str, tuple[dict[str, torch.dtype], dict[str, Any]]] = {
    "autoawq_217_gemv": (AWQ, {"quant_method": "awq", "version": "gemv"}),
    "autoawq_217_gemv_fast": (AWQ, {"quant_method": "awq", "version": "gemv_fast"}),
    "vllm_13122_bitsandbytes": (BITSANDBYTES, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "gptq_planar": (GPTQ, {"quant_method": "gptq", "bits": 4, "format": "gptq_p"}),
    "gptq_marlin": (GPTQ, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
    "auto_round": (GPTQ, {"quant_method": "auto-round", "group_size": 128}),
    "nvfp4": (PACKED, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "mxfp4": (PACKED, {"quant_method": "mxfp4"}),
}


def quantised(folder: Path, parts: Mapping[str, torch.dtype]) -> Path:
    """A tiny checkpoint in which one layer is stored as `parts`."""
    file = make_tiny_llama(folder) / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{LAYER}.weight"]
    tensors.update({f"{LAYER}.{part}": torch.zeros(64, 128).to(dtype) for part, dtype in parts.items()})
    save_file(tensors, file)
    return folder


def refused(folder: Path, code: str = "unsupported") -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.code == code
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, case: str) -> None:
    parts, config = REFUSED[case]
    if config["quant_method"] == "compressed-tensors":
        config = {**config, "config_groups": {"group_0": {"targets": ["Linear"]}}}
    change_config(quantised(tmp_path, parts), quantization_config=config)
    error = refused(tmp_path)
    assert error.file == tmp_path / "config.json"
    assert error.found in config.values()
    assert error.found is not None
    assert error.found in error.message


@pytest.mark.parametrize("parts", [GPTQ, AWQ, FP8_BLOCK, PACKED, BITSANDBYTES, {"weight": torch.float8_e4m3fn}])
def test_quantised_weights_whose_config_was_lost(tmp_path: Path, parts: Mapping[str, torch.dtype]) -> None:
    error = refused(quantised(tmp_path, parts))
    assert error.file == tmp_path / "model.safetensors"
    assert error.tensor in {f"{LAYER}.{part}" for part in parts}
    assert error.found


@pytest.mark.parametrize(
    ("form", "part"),
    [
        (fp8_tensor(), "weight_scale"),
        (fp8_blocks(), "weight_scale_inv"),
        (fp8_tensor(input_scale=0.5), "input_scale"),
        (int8(), "weight_scale"),
        (pack_quantized(), "weight_scale"),
        (pack_quantized(symmetric=False), "weight_zero_point"),
        (pack_quantized(act_order=True), "weight_g_idx"),
        (gptq(), "scales"),
        (gptq(), "qzeros"),
        (gptq(act_order=True), "g_idx"),
    ],
)
def test_vllm_34859_and_57108_and_llm_compressor_959_part_missing(tmp_path: Path, form: Format, part: str) -> None:
    make_tiny_quantised(tmp_path, form)
    tensors = stored_tensors(tmp_path)
    del tensors[f"{LAYER}.{part}"]
    write_tensors(tmp_path / "model.safetensors", tensors)
    error = refused(tmp_path, "invalid")
    assert (error.tensor, error.found) == (f"{LAYER}.{part}", "nothing")


def test_vllm_34859_shard_of_a_quantised_model_missing(tmp_path: Path) -> None:
    make_tiny_quantised(tmp_path, gptq())
    tensors = stored_tensors(tmp_path)
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {name: tensors[name] for name in names[::2]})
    assert refused(tmp_path, "not_found").found == "1 files"
    # As complete to the eye as the whole: one file, and half the tensors.
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model.safetensors")
    assert refused(tmp_path, "invalid").found == "nothing"


def test_llm_compressor_959_config_ignores_what_is_quantised(tmp_path: Path) -> None:
    form = int8()
    make_tiny_quantised(tmp_path, form)
    change_config(tmp_path, quantization_config={**form.config, "ignore": ["lm_head", f"re:.*{LAYER[-9:]}$"]})
    error = refused(tmp_path, "invalid")
    assert (error.tensor, error.expected) == (f"{LAYER}.weight_scale", "no such tensor")


def test_vllm_54623_scales_of_the_kv_cache_by_config(tmp_path: Path) -> None:
    form = int8()
    make_tiny_quantised(tmp_path, form)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    change_config(tmp_path, quantization_config={**form.config, "kv_cache_scheme": scheme})
    error = refused(tmp_path)
    assert "KV cache" in error.message
    assert error.file == tmp_path / "config.json"


@pytest.mark.parametrize("form", [int8(), fp8_blocks()], ids=["compressed-tensors", "fp8"])
def test_vllm_54623_scales_of_the_kv_cache_beside_quantised_weights(tmp_path: Path, form: Format) -> None:
    make_tiny_quantised(tmp_path, form)
    name = "model.layers.1.self_attn.k_scale"
    write_tensors(tmp_path / "model.safetensors", {**stored_tensors(tmp_path), name: Tensor("F32", np.ones(1))})
    error = refused(tmp_path)
    assert error.tensor == name
    assert "KV cache" in error.message


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "attn.k_scale", "kv_scale"])
def test_vllm_54623_scales_of_the_kv_cache(tmp_path: Path, name: str) -> None:
    file = make_tiny_llama(tmp_path) / "model.safetensors"
    tensor = f"model.layers.1.self_attn.{name}"
    save_file({**load_file(file), tensor: torch.ones(1)}, file)
    error = refused(tmp_path)
    assert (error.tensor, error.file) == (tensor, file)
    assert "KV cache" in error.message


@pytest.mark.parametrize("name", ["model-rank-0-part-0.safetensors", "rank0.safetensors"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_vllm_41174_and_sglang_25332_sharded_state(tmp_path: Path, name: str, num_ranks: int) -> None:
    file = make_tiny_llama(tmp_path) / "model.safetensors"
    for rank in range(num_ranks):
        (tmp_path / name.replace("0", str(rank), 1)).write_bytes(file.read_bytes())
    file.unlink()
    assert refused(tmp_path).file == tmp_path / name


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"r": 64}, id="vllm_2847_rank"),
        pytest.param({"r": 8, "target_modules": ["nothing"]}, id="vllm_34186_no_module_matches"),
        pytest.param({"r": 8, "use_rslora": True}, id="vllm_10798_rslora"),
    ],
)
@pytest.mark.parametrize("with_config", [False, True])
def test_adapter(tmp_path: Path, adapter: dict[str, Any], with_config: bool) -> None:
    """None is taken for a model, nor loaded into one without effect."""
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(adapter["r"], 64)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    if not with_config:
        (folder / "config.json").unlink()
    assert "LoRA adapter" in refused(folder).message
