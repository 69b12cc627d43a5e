"""Tensors that tell by their names that a checkpoint is of a kind we do not load. Imports no torch."""

from collections.abc import Mapping

from loader.errors import CheckpointError
from loader.tensors import TensorInfo

_LORA, _BITSANDBYTES = "a LoRA adapter", "weights quantised by bitsandbytes"
_GPTQ, _PACKED = "weights quantised by GPTQ or AWQ", "weights packed to few bits"
_FEW_BITS = "weights quantised to 8 bits or fewer"
_SERVED = (_GPTQ, _PACKED, _FEW_BITS)
_CACHE_SCALES = "scales of a quantised KV cache"
# The last part of a tensor's name -> what has tensors of such names. Whole tables and no expressions: a large
# checkpoint has 10^5 names.
_BY_LAST_PART = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), _GPTQ),
    **dict.fromkeys(("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point"), _PACKED),
    **dict.fromkeys(("weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale"), _FEW_BITS),
    **dict.fromkeys(("SCB", "absmax", "quant_map", "nested_absmax", "nested_quant_map"), _BITSANDBYTES),
    **dict.fromkeys(("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale"), _CACHE_SCALES),
}
_USE_UNQUANTISED = (
    "restore the quantization_config of its config.json if the model is quantised, or use the unquantised model"
)
_REMEDIES = {
    _LORA: "pass the base model, or merge the adapter into it first",
    _CACHE_SCALES: "use the model without them: its KV cache would be computed otherwise than it was tuned for",
}


def refuse_foreign_tensors(tensors: Mapping[str, TensorInfo], *, quantised: bool = False) -> None:
    """Raises CheckpointError "unsupported" at the first tensor whose name is that of an adapter, of a quantised KV
    cache or of quantised weights: the error says so even where the config does not.

    Where the config does (`quantised`), what it names is served.
    """
    for name, stored in tensors.items():
        kind = _kind(name)
        if kind is not None and not (quantised and kind in _SERVED):
            raise CheckpointError(
                "unsupported",
                f"{stored.file} holds {kind} (tensor {name!r}), which are not supported",
                _REMEDIES.get(kind, _USE_UNQUANTISED),
                file=stored.file,
                tensor=name,
                expected="whole weights in F32, F16 or BF16",
                found=kind,
            )


def _kind(name: str) -> str | None:
    if ".lora_" in name or name.startswith("base_model.model."):
        return _LORA
    if ".quant_state." in name:
        return _BITSANDBYTES
    return _BY_LAST_PART.get(name.rpartition(".")[2])
