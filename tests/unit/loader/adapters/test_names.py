from pathlib import Path

import pytest

from loader.adapters.names import parse_names
from loader.errors import CheckpointError
from loader.tensors import TensorInfo

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def info(name: str) -> TensorInfo:
    return TensorInfo(name, "F32", (2, 2), Path("adapter_model.safetensors"), 0, 16, name)


@pytest.mark.parametrize(
    ("name", "module", "part"),
    [
        (f"{Q}.lora_A.weight", "model.layers.0.self_attn.q_proj", "lora_A.weight"),
        (f"{Q}.lora_B.default.weight", "model.layers.0.self_attn.q_proj", "lora_B.weight"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "model.embed_tokens", "lora_embedding_A"),
        ("base_model.model.model.embed_tokens.lora_embedding_B.default", "model.embed_tokens", "lora_embedding_B"),
        ("base_model.model.model.embed_tokens.base_layer.weight", "model.embed_tokens", "base_layer.weight"),
        ("base_model.model.lm_head.weight", "lm_head", "weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head", "weight"),
        ("base_model.model.lm_head.modules_to_save.bias", "lm_head", "bias"),
    ],
)
def test_a_name_is_a_module_and_a_part(name: str, module: str, part: str) -> None:
    tensor = info(name)
    assert parse_names([tensor]) == {(module, part): tensor}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "invalid"),
        ("base_model.model.lm_head", "invalid"),
        (f"{Q}.lora_A.other.weight", "invalid"),
        (f"{Q}.lora_magnitude_vector", "unsupported"),
        (f"{Q}.lora_magnitude_vector.default.weight", "unsupported"),
        (f"{Q}.lora_B.bias", "unsupported"),
        ("base_model.model.model.embed_tokens.trainable_tokens_delta", "unsupported"),
    ],
)
def test_any_other_name_is_refused(name: str, code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_names([info(name)])
    assert (caught.value.code, caught.value.tensor) == (code, name)
    assert caught.value.remedy


def test_two_names_of_one_part_are_refused() -> None:
    with pytest.raises(CheckpointError, match="means the same"):
        parse_names([info(f"{Q}.lora_A.weight"), info(f"{Q}.lora_A.default.weight")])
