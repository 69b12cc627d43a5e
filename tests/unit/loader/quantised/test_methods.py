"""What quantization_configs say of each product, and what is refused of them."""

from pathlib import Path
from typing import Any

import pytest

from loader.errors import CheckpointError
from loader.fields import Fields
from loader.quantised.activations import Activation
from loader.quantised.methods import METHODS, method_of
from loader.quantised.schemes import AwqScheme, GptqScheme, GridScheme, PackScheme, Scheme

NAMES = [
    *(f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1, 10) for name in ("q", "o")),
    *(f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1, 10)),
    "lm_head",
]
FILE = Path("config.json")


def schemes(content: dict[str, Any]) -> dict[str, Scheme]:
    fields = Fields(FILE, content)
    return METHODS[method_of(fields)](fields, NAMES)


def refused(content: dict[str, Any]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        schemes(content)
    assert caught.value.file == FILE
    assert caught.value.remedy
    return caught.value


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True}


def test_gptq() -> None:
    found = schemes(GPTQ)
    assert set(found) == set(NAMES[:-1])
    assert set(found.values()) == {GptqScheme(4, 64, False, True, zero_offset=1)}
    assert schemes({**GPTQ, "lm_head": True}).keys() == set(NAMES)
    for name in ("checkpoint_format", "format"):
        second = schemes({**GPTQ, name: "gptq_v2", "group_size": -1})
        assert set(second.values()) == {GptqScheme(4, 0, False, True, zero_offset=0)}


def test_gptq_without_a_name_is_known_by_its_bits() -> None:
    assert method_of(Fields(FILE, {"bits": 4, "group_size": 128})) == "gptq"


def test_gptq_overrides_by_expression_first_match_first() -> None:
    found = schemes(
        {
            **GPTQ,
            "dynamic": {
                r"-:.*\.layers\.1\..*": {},
                r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
                r".*\.layers\.[01]\.mlp": {"bits": 2},
                r"model\.layers\.0\.self_attn\.q": {"desc_act": False},
            },
        }
    )
    assert not any(".layers.1." in name for name in found)
    assert found["model.layers.0.mlp.down_proj"] == GptqScheme(8, 32, False, True, 1)
    assert found["model.layers.10.mlp.down_proj"] == GptqScheme(8, 32, False, True, 1)
    assert found["model.layers.0.self_attn.q_proj"] == GptqScheme(4, 64, False, False, 1)
    assert found["model.layers.0.self_attn.o_proj"] == GptqScheme(4, 64, False, True, 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"bits": 5}, "invalid"),
        ({"bits": "four"}, "invalid"),
        ({"bits": None}, "invalid"),
        ({"group_size": 0}, "invalid"),
        ({"group_size": -2}, "invalid"),
        ({"group_size": 1 << 40}, "invalid"),
        ({"sym": "yes"}, "invalid"),
        ({"dynamic": [1]}, "invalid"),
        ({"dynamic": {"(": {}}}, "invalid"),
        ({"dynamic": {"a": 4}}, "invalid"),
        ({"dynamic": {".*": {"bits": 7}}}, "invalid"),
        ({"checkpoint_format": "gptq_p"}, "unsupported"),
        ({"checkpoint_format": "bitblas"}, "unsupported"),
        ({"is_marlin_format": True}, "unsupported"),
    ],
)
def test_gptq_refusals(changes: dict[str, Any], code: str) -> None:
    assert refused({**GPTQ, **changes}).code == code


def test_awq() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}
    assert set(schemes(config).values()) == {AwqScheme(64)}
    assert set(schemes({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}).values()) == {AwqScheme(32)}
    kept = schemes({**config, "modules_to_not_convert": ["self_attn", "lm_head"]})
    assert set(kept) == {name for name in NAMES if "mlp" in name}
    assert refused({**config, "bits": 3}).code == "invalid"
    assert refused({**config, "modules_to_not_convert": "self_attn"}).code == "invalid"


def test_fp8() -> None:
    by_tensor = schemes({"quant_method": "fp8", "activation_scheme": "static"})
    assert set(by_tensor.values()) == {GridScheme("F8_E4M3", 0, 0, Activation("fp8", is_static=True))}
    blocks = schemes({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]})
    expected = GridScheme("F8_E4M3", 128, 64, Activation("fp8", group_size=64), "weight_scale_inv")
    assert set(blocks.values()) == {expected}
    for changes in ({"fmt": "e5m2"}, {"activation_scheme": "none"}, {"weight_block_size": [0, 1]}):
        refused({"quant_method": "fp8", **changes})
    assert refused({"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "static"})


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **changes,
    }


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "inputs", "form", "expected"),
    [
        (INT8, BY_TOKEN, "int-quantized", GridScheme("I8", 1, 0, Activation("int8"))),
        (INT8, None, "naive-quantized", GridScheme("I8", 1, 0)),
        ({"num_bits": 8}, None, "int-quantized", GridScheme("I8", 0, 0)),
        (
            FLOAT8,
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            "float-quantized",
            GridScheme("F8_E4M3", 0, 0, Activation("fp8", is_static=True)),
        ),
        (
            {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
            "float-quantized",
            GridScheme("F8_E4M3", 128, 128, Activation("fp8", group_size=128)),
        ),
        (INT4, None, "pack-quantized", PackScheme(4, 128, True, act_order=False)),
        ({**INT4, "actorder": "weight"}, None, "pack-quantized", PackScheme(4, 128, True, act_order=False)),
        ({**INT4, "actorder": "group"}, None, "pack-quantized", PackScheme(4, 128, True, act_order=True)),
        ({**INT4, "symmetric": False}, None, "pack-quantized", PackScheme(4, 128, False, act_order=False)),
        (
            {**INT8, "group_size": -1, "strategy": None},
            None,
            "pack-quantized",
            PackScheme(8, 0, True, act_order=False),
        ),
        ({"num_bits": 8}, None, "pack-quantized", PackScheme(8, 0, True, act_order=False, scale_rank=1)),
    ],
)
def test_compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, expected: Scheme) -> None:
    found = schemes(compressed(weights, inputs, format=form))
    assert found == dict.fromkeys(NAMES[:-1], expected)


def test_a_product_takes_the_group_that_means_it_most() -> None:
    def group(targets: list[str], bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
        return {"targets": targets, "weights": weights, "format": "pack-quantized"}

    groups = {
        "by_class": group(["Linear"], 2),
        "by_expression": group(["re:.*layers.1", "model.layers.0.mlp.down_proj"], 4),
        "by_name": group(["model.layers.10.self_attn.q_proj", "re:.*down_proj$"], 8),
    }
    found = schemes(compressed(INT8, config_groups=groups, ignore=["re:.*layers.1..self_attn.o_proj", "lm_head"]))

    def bits(name: str) -> int:
        scheme = found[f"model.layers.{name}"]
        assert isinstance(scheme, PackScheme)
        return scheme.bits

    assert bits("0.self_attn.q_proj") == 2
    assert bits("1.self_attn.q_proj") == 4
    assert bits("10.self_attn.q_proj") == 8
    assert bits("0.mlp.down_proj") == 4
    # The first of two expressions that match.
    assert bits("10.mlp.down_proj") == 4
    assert "model.layers.10.self_attn.o_proj" not in found
    assert "lm_head" not in found


@pytest.mark.parametrize(
    "content",
    [
        compressed(INT8, format="nvfp4-pack-quantized"),
        compressed(INT8, format="mxfp4-pack-quantized"),
        compressed(INT8, format="marlin-24"),
        compressed(INT8, format=None),
        compressed(INT8, kv_cache_scheme={"num_bits": 8}),
        compressed(INT8, transform_config={"config_groups": {}, "x": 1}),
        compressed(INT8, sparsity_config={"format": "sparse-24-bitmask"}),
        compressed({**INT8, "symmetric": False}),
        compressed({**INT8, "num_bits": 4}),
        compressed(FLOAT8),
        compressed(INT8, {**BY_TOKEN, "type": "float"}),
        compressed(INT8, {**BY_TOKEN, "symmetric": False}),
        compressed(INT8, {**BY_TOKEN, "num_bits": 4}),
        compressed(INT8, {**BY_TOKEN, "dynamic": "local"}),
        compressed({**INT8, "strategy": "attn_head"}),
        compressed(INT4, BY_TOKEN, format="pack-quantized"),
        compressed({**INT4, "num_bits": 3}, format="pack-quantized"),
        compressed({**INT4, "actorder": "sideways"}, format="pack-quantized"),
        compressed({"num_bits": 4, "symmetric": False}, format="pack-quantized"),
    ],
)
def test_compressed_that_we_do_not_have(content: dict[str, Any]) -> None:
    assert refused(content).code == "unsupported"


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": None},
        {"config_groups": {}},
        {"config_groups": {"a": 5}},
        {"config_groups": {"a": {"targets": "Linear"}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": [4]}}},
        {"ignore": {"a": 1}},
        {"ignore": ["re:("]},
        {"config_groups": {"a": {"targets": [f"re:{n}" for n in range(1025)], "weights": INT8}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {**INT8, "strategy": "group"}}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {**INT8, "strategy": "block"}}}},
    ],
)
def test_compressed_that_makes_no_sense(changes: dict[str, Any]) -> None:
    assert refused(compressed(INT8, **changes)).code == "invalid"


def test_sparsity_that_is_none() -> None:
    assert schemes(compressed(INT8, sparsity_config={"format": "dense"}))
    assert method_of(Fields(FILE, {"config_groups": {"a": {}}})) == "compressed-tensors"


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quip", "aqlm", "modelopt", "mxfp4", "fbgemm_fp8", ""])
def test_methods_that_we_do_not_have(method: str) -> None:
    error = refused({"quant_method": method} if method else {"load_in_8bit": True})
    assert error.code == "unsupported"
    assert "GPTQ" in error.remedy
    assert error.found == (method or "an unnamed method")
