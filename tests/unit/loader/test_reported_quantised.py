"""Quantised checkpoints and adapters that others were reported to load into wrong output, or into a crash.

None of these kinds is supported: each is refused as what it is, with and without the config that names it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from tests.support.tiny_checkpoint import make_tiny_llama

LAYER = "model.layers.0.mlp.down_proj"
GPTQ = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}
AWQ = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
FP8_BLOCK = {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}
PACKED = {"weight_packed": torch.int32, "weight_scale": torch.float16, "weight_shape": torch.int64}
BITSANDBYTES = {"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32}

CASES: Mapping[str, tuple[dict[str, torch.dtype], dict[str, Any]]] = {
    "vllm_26343_gptq_v2": (GPTQ, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "vllm_38966_gptq_v2_that_says_v1": (GPTQ, {"quant_method": "gptq", "checkpoint_format": "gptq"}),
    "vllm_7374_desc_act": (GPTQ, {"quant_method": "gptq", "desc_act": True}),
    "vllm_5675_and_21695_odd_number_of_groups": (GPTQ, {"quant_method": "gptq", "group_size": 128}),
    "auto_round_643_odd_number_of_groups": (GPTQ, {"quant_method": "auto-round", "group_size": 128}),
    "autoawq_217_gemv": (AWQ, {"quant_method": "awq", "version": "gemv"}),
    "sglang_3345_and_vllm_52997_fp8_blocks": (FP8_BLOCK, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "vllm_57108_fp8_without_scales": ({"weight": torch.float8_e4m3fn}, {"quant_method": "fp8"}),
    "llm_compressor_959_scale": (PACKED, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "vllm_13122_bitsandbytes": (BITSANDBYTES, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def quantised(folder: Path, parts: Mapping[str, torch.dtype]) -> Path:
    """A tiny checkpoint in which one layer is stored as `parts`."""
    file = make_tiny_llama(folder) / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{LAYER}.weight"]
    tensors.update({f"{LAYER}.{part}": torch.zeros(64, 128).to(dtype) for part, dtype in parts.items()})
    save_file(tensors, file)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.code == "unsupported"
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_quantised_weights(tmp_path: Path, case: str) -> None:
    parts, config = CASES[case]
    change_config(quantised(tmp_path, parts), quantization_config=config)
    error = refused(tmp_path)
    assert (error.file, error.found) == (tmp_path / "config.json", config["quant_method"])
    assert "GGUF" in error.remedy


@pytest.mark.parametrize("case", CASES)
def test_quantised_weights_whose_config_was_lost(tmp_path: Path, case: str) -> None:
    parts, _ = CASES[case]
    error = refused(quantised(tmp_path, parts))
    assert error.file == tmp_path / "model.safetensors"
    assert error.tensor in {f"{LAYER}.{part}" for part in parts}
    assert error.found


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
