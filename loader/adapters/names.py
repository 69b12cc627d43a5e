"""Names of an adapter's tensors: a module of the base model, and which part of its change the tensor is."""

from collections.abc import Iterable

from loader.adapters.config import MERGE_WITH_PEFT
from loader.errors import CheckpointError
from loader.tensors import TensorInfo

PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
WEIGHT, BIAS = "weight", "bias"
BASE_WEIGHT = "base_layer.weight"
"""The base's own weight, which PEFT saves beside the factors of an embedding."""

_PARTS = (A, B, EMBEDDING_A, EMBEDDING_B, BASE_WEIGHT, WEIGHT, BIAS)
_UNSUPPORTED = {
    "lora_magnitude_vector": "magnitudes of DoRA",
    "lora_bias": "a bias of its factors",
    "trainable_tokens_delta": "rows of an embedding",
    "trainable_tokens_indices": "rows of an embedding",
}


def parse_names(tensors: Iterable[TensorInfo]) -> dict[tuple[str, str], TensorInfo]:
    """The tensors by module and part.

    Names that PEFT saves, and those of state dicts as they are in memory, with the adapter's name "default" or
    "modules_to_save" in them, mean the same. Raises CheckpointError "invalid" for a name that is neither, and for two
    that mean the same; "unsupported" for parts that we do not apply.
    """
    found: dict[tuple[str, str], TensorInfo] = {}
    for tensor in tensors:
        key = _parse(tensor)
        other = found.setdefault(key, tensor)
        if other is not tensor:
            raise _invalid(tensor, f"means the same as {other.name!r}", "remove one of them")
    return found


def _parse(tensor: TensorInfo) -> tuple[str, str]:
    if not tensor.name.startswith(PREFIX):
        remedy = "save the adapter with PEFT's save_pretrained"
        raise _invalid(tensor, f"does not begin with {PREFIX}", remedy, expected=f"{PREFIX}MODULE.PART")
    parts = [""]
    for part in tensor.name.removeprefix(PREFIX).split("."):
        is_adapter_name = part == "default" and (parts[-1].startswith("lora_") or parts[-1] == "modules_to_save")
        if not is_adapter_name:
            parts.append(part)
    name = ".".join(part for part in parts[1:] if part != "modules_to_save")
    for part, what in _UNSUPPORTED.items():
        if part in parts or (part == "lora_bias" and name.endswith(("lora_A.bias", "lora_B.bias"))):
            raise CheckpointError(
                "unsupported",
                f"{tensor.file} holds {what} (tensor {tensor.name!r}), which are not supported",
                MERGE_WITH_PEFT,
                file=tensor.file,
                tensor=tensor.name,
                expected="factors of a product",
                found=what,
            )
    for part in _PARTS:
        module = name.removesuffix(f".{part}")
        if module != name and "lora_" not in module:
            return module, part
    raise _invalid(tensor, "is no part of a LoRA adapter", "use an adapter saved with PEFT's save_pretrained")


def _invalid(tensor: TensorInfo, what: str, remedy: str, expected: str | None = None) -> CheckpointError:
    return CheckpointError(
        "invalid",
        f"{tensor.file}: tensor {tensor.name!r} {what}",
        remedy,
        file=tensor.file,
        tensor=tensor.name,
        expected=expected,
        found=tensor.name,
    )
