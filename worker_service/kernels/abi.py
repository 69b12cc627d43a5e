"""The C interface of cpu/api.h, in ctypes."""

import ctypes
from ctypes import POINTER, Structure, c_bool, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

_Pointer = c_void_p


class Quantised(Structure):
    """SwQuantised."""

    _fields_ = (
        *((name, _Pointer) for name in ("words", "scales", "minima", "factors", "minimum_factors", "zeros", "order")),
        *(
            (name, c_int32)
            for name in (
                *("bits", "inputs", "depth", "groups", "groups_of_scale", "span", "zero", "scale_type"),
                *("rounding", "rounding_group"),
            )
        ),
    )


class Layer(Structure):
    """SwLayer."""

    _fields_ = (
        *(
            (name, _Pointer)
            for name in (
                *("qkv", "output", "gate_up", "down"),
                *("quantised_qkv", "quantised_output", "quantised_gate_up", "quantised_down"),
                *("qkv_bias", "output_bias", "gate_up_bias", "down_bias"),
                *("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm", "query_norm", "key_norm"),
                *("cos", "sin"),
            )
        ),
        ("window", c_int32),
        ("rotary_half", c_int32),
    )


class Model(Structure):
    """SwModel."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                *("dtype", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "inner_size", "num_layers"),
                *("vocab_size", "is_gelu", "norm_whole", "block_size", "rounds_cache"),
            )
        ),
        *((name, c_float) for name in ("eps", "scale", "softcap", "embedding_scale", "logit_softcap")),
        ("layers", POINTER(Layer)),
        ("embedding", _Pointer),
        ("quantised_embedding", _Pointer),
        ("final_norm", _Pointer),
        ("head", _Pointer),
        ("quantised_head", _Pointer),
        ("cache", _Pointer),
    )


class Factors(Structure):
    """SwFactors."""

    _fields_ = (("a", _Pointer), ("b", _Pointer), ("rank", c_int32), ("scaling", c_float))


class Run(Structure):
    """SwRun."""

    _fields_ = (("factors", _Pointer), ("first", c_int32), ("count", c_int32))


class Batch(Structure):
    """SwBatch."""

    _fields_ = (
        ("num_sequences", c_int32),
        ("num_tokens", c_int32),
        ("query_start", _Pointer),
        ("computed", _Pointer),
        ("tables", _Pointer),
        ("table_stride", c_int64),
        ("runs", _Pointer),
        ("num_runs", c_int32),
        ("wanted", _Pointer),
        ("num_wanted", c_int64),
    )


class Head(Structure):
    """SwHead."""

    _fields_ = (
        ("rows", _Pointer),
        ("num_rows", c_int64),
        ("logits", _Pointer),
        ("token_ids", _Pointer),
        ("finite", _Pointer),
    )


# What a decoder's time goes to, in the order of SW_EMBED and those after it.
OPERATORS = ("embed", "norms", "qkv", "write_kv", "attention", "o_proj", "gate_up", "down", "head")

_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "sw_pool_create": (c_void_p, (c_int32, c_int32, c_int32)),
    "sw_pool_destroy": (None, (c_void_p,)),
    "sw_shared_bytes": (c_int64, (c_int32, c_int64)),
    "sw_shared_open": (c_void_p, (c_int32, c_int32, c_int32, c_int64, _Pointer, c_int32, c_int64)),
    "sw_shared_close": (None, (c_void_p,)),
    "sw_shared_sum": (c_int32, (c_void_p, c_int32, _Pointer, c_int64)),
    "sw_shared_gather": (c_int32, (c_void_p, _Pointer, c_int64, _Pointer)),
    "sw_shared_broadcast": (c_int32, (c_void_p, _Pointer, c_int64)),
    "sw_linear": (c_bool, (c_void_p, c_int32, _Pointer, c_int64, _Pointer, _Pointer, c_int32, c_int32, _Pointer)),
    "sw_quantised_linear": (
        c_bool,
        (c_void_p, c_int32, _Pointer, c_int64, POINTER(Quantised), _Pointer, c_int32, _Pointer),
    ),
    "sw_decoder_create": (c_void_p, (c_void_p, POINTER(Model))),
    "sw_decoder_destroy": (None, (c_void_p,)),
    "sw_decoder_time": (None, (c_void_p, _Pointer)),
    "sw_forward": (c_bool, (c_void_p, POINTER(Batch), _Pointer, _Pointer, c_int32, c_int32, POINTER(Head))),
    "sw_attention_half": (c_bool, (c_void_p, POINTER(Batch), c_int32, _Pointer, _Pointer)),
    "sw_mlp_half": (c_bool, (c_void_p, POINTER(Batch), c_int32, _Pointer, _Pointer)),
    "sw_add_branch": (c_bool, (c_void_p, c_int32, c_int32, c_int32, _Pointer, _Pointer)),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a library that `build` made. Calls of a CDLL release the interpreter's lock. Raises OSError.

    Its functions raise MemoryError.
    """
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        if result is c_bool or name.endswith("_create"):
            function.errcheck = _checked
    return library


def _checked(result: Any, function: Any, _arguments: Any) -> Any:
    """What a function answered that says by nothing, or false, that it found no memory."""
    if not result:
        raise MemoryError(f"{function.__name__} of the compiled kernels found no memory, or no room for a thread")
    return result
