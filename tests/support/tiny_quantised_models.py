"""Tiny checkpoints whose products are quantised, in each format, with the unquantised ones that they stand for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_quantised import (
    QuantisedWeight,
    Shape,
    Tensor,
    awq_weight,
    gptq_weight,
    grid_weight,
    packed_weight,
    write_tensors,
)

Draw = Callable[[np.random.Generator, Shape], QuantisedWeight]


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint is quantised: its quantization_config, and what is stored of each weight."""

    config: Mapping[str, Any]
    draw: Draw
    shape: Shape = field(default_factory=lambda: Shape(0, 0))


def gptq(bits: int = 4, *, version: int = 1, lm_head: bool = False, **shape: Any) -> Format:
    """GPTQ, maybe of the output layer too; `shape` is what `Shape` takes."""
    drawn = Shape(0, 0, bits, **{"balanced": True, **shape})
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": drawn.group_size,
        "sym": drawn.symmetric,
        "desc_act": drawn.act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": lm_head,
    }
    return Format(config, lambda rng, sizes: gptq_weight(rng, sizes, version=version), drawn)


def awq(group_size: int = 32) -> Format:
    """AWQ, version "gemm"."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Format(config, awq_weight, Shape(0, 0, 4, group_size, symmetric=False, balanced=True))


def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group for all products but the output layer."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def pack_quantized(bits: int = 4, group_size: int = 32, *, symmetric: bool = True, act_order: bool = False) -> Format:
    """compressed-tensors' packed weights."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if act_order else None,
    }
    shape = Shape(0, 0, bits, group_size, symmetric, act_order, balanced=True)
    return Format(compressed("pack-quantized", weights), packed_weight, shape)


def int8(inputs: Mapping[str, Any] | None = None) -> Format:
    """compressed-tensors' W8A8: int8 with a scale a row; `inputs` None leaves the inputs as they are."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return Format(
        compressed("int-quantized", weights, inputs),
        lambda rng, shape: grid_weight(rng, shape, dtype="I8", block=(1, 0)),
        Shape(0, 0, scale_dtype="F32"),
    )


def fp8_blocks(size: int = 16) -> Format:
    """Native FP8 with square blocks."""
    return Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [size, size]},
        lambda rng, shape: grid_weight(rng, shape, dtype="F8_E4M3", block=(size, size), scale_name="weight_scale_inv"),
        Shape(0, 0, scale_dtype="F32"),
    )


def fp8_tensor(scale_shape: tuple[int, ...] = (), *, input_scale: float | None = None) -> Format:
    """Native FP8 with one scale a weight."""

    def draw(rng: np.random.Generator, shape: Shape) -> QuantisedWeight:
        weight = grid_weight(rng, shape, dtype="F8_E4M3", block=(0, 0), scale_shape=scale_shape)
        if input_scale is not None:
            weight.tensors["input_scale"] = Tensor("F32", np.array(input_scale))
        return weight

    scheme = "dynamic" if input_scale is None else "static"
    return Format({"quant_method": "fp8", "activation_scheme": scheme}, draw, Shape(0, 0, scale_dtype="F32"))


def float_quantized(strategy: str = "channel", inputs: Mapping[str, Any] | None = None) -> Format:
    """compressed-tensors' FP8; `inputs` None leaves the inputs as they are."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    block = {"tensor": (0, 0), "channel": (1, 0), "block": (16, 16)}[strategy]
    if strategy == "block":
        weights["block_structure"] = list(block)
    return Format(
        compressed("float-quantized", weights, inputs),
        lambda rng, shape: grid_weight(rng, shape, dtype="F8_E4M3", block=block),
        Shape(0, 0, scale_dtype="F32"),
    )


WEIGHT_ONLY = {
    "gptq": gptq(),
    "gptq_2_bit": gptq(2),
    "gptq_3_bit": gptq(3),
    "gptq_8_bit": gptq(8),
    "gptq_asymmetric": gptq(symmetric=False),
    "gptq_v2": gptq(version=2, symmetric=False),
    "gptq_ordered": gptq(act_order=True),
    "gptq_one_group": gptq(group_size=-1),
    "gptq_with_its_output_layer": gptq(lm_head=True),
    "awq": awq(),
    "packed": pack_quantized(),
    "packed_8_bit": pack_quantized(8, -1),
    "packed_asymmetric": pack_quantized(symmetric=False),
    "packed_ordered": pack_quantized(act_order=True),
    "int8_weights": int8(),
    "fp8_weights": float_quantized(),
    "fp8_weights_in_blocks": float_quantized("block"),
}
"""The formats that say nothing of inputs: their products are those of the weights."""

BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
ROUNDED_INPUTS = {
    "w8a8": int8(BY_TOKEN),
    "fp8_blocks": fp8_blocks(),
    "fp8_tensor": fp8_tensor(),
    "fp8_static": fp8_tensor(input_scale=1 / 16),
    "fp8_by_token": float_quantized("channel", {**BY_TOKEN, "type": "float"}),
}
"""The formats that round inputs too: their products differ from those of the weights, a little."""


def make_tiny_quantised(folder: Path, form: Format, *, dense: Path | None = None, **llama: Any) -> Path:
    """A tiny Llama in `folder` whose projections are drawn in the format; returns `folder`.

    The output layer is too where the format's config says so. `dense` gets the same model unquantised, in float32.
    `llama` is what `make_tiny_llama` takes.
    """
    suffixes = ("_proj.weight", "lm_head.weight") if form.config.get("lm_head") else ("_proj.weight",)
    make_tiny_llama(folder, **llama)
    if dense is not None:
        make_tiny_llama(dense, **llama)
    rng = np.random.default_rng(7)
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        quantised[name] = plain[name] = Tensor("F32", array)
        if not name.endswith(suffixes):
            continue
        rows, columns = array.shape
        weight = form.draw(rng, replace(form.shape, num_outputs=rows, num_inputs=columns))
        del quantised[name]
        quantised.update({f"{name.removesuffix('weight')}{part}": stored for part, stored in weight.tensors.items()})
        plain[name] = Tensor("F32", weight.dense)
    write_tensors(folder / "model.safetensors", quantised)
    change_config(folder, quantization_config=form.config)
    if dense is not None:
        write_tensors(dense / "model.safetensors", plain)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Lays `changes` over config.json; None removes a key."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a tiny quantised checkpoint, to be changed and written again."""
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    codes = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I8": "i1", "F8_E4M3": "u1"}
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            array = np.frombuffer(raw[start:stop], dtype=codes[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = Tensor(entry["dtype"], array)
    return tensors
