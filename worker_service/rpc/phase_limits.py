"""What the calls of the phases may ask for: every number and word is bounded here before it is taken up."""

from loader.needs import KV_CACHE_DTYPES
from loader.quantised.settle import QUANTIZE
from stepwire.rpc.errors import StepwireError
from worker_service.rpc.limits import check_number, out_of_range
from worker_service.rpc.state import Measured, Place
from worker_service.runtime.report import LoadSummary

MAX_STEP_TOKENS = 2**20
MAX_SEQUENCES = 2**16
MAX_BLOCK_SIZE = 2**12
MAX_INT32 = 2**31 - 1
DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_cache(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raises FIELD_OUT_OF_RANGE."""
    check_number("block_count", num_blocks, 1, MAX_INT32)
    check_number("block_size", block_size, 1, MAX_BLOCK_SIZE)
    check_number("max_model_len", max_model_len, 1, MAX_INT32)


def check_types(dtype: str, quantize: str, kv_cache_dtype: str) -> None:
    """Of weights and cache. Raises FIELD_INVALID."""
    _check_choice("dtype", dtype, DTYPES)
    _check_choice("quantize", quantize, QUANTIZE)
    _check_choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        found = value[:64]  # as much as a log line can bear
        message = f"{field} {found!r} is not one of {', '.join(choices)}"
        raise StepwireError("FIELD_INVALID", message, {"field": field, "found": found})


def check_place(place: Place, rendezvous: str) -> None:
    """Raises FIELD_OUT_OF_RANGE, FIELD_INVALID."""
    check_number("tensor_parallel_size", place.tensor_parallel_size, 1, 1024)
    check_number("pipeline_parallel_size", place.pipeline_parallel_size, 1, 1024)
    check_number("tensor_rank", place.tensor_rank, 0, place.tensor_parallel_size - 1)
    check_number("pipeline_rank", place.pipeline_rank, 0, place.pipeline_parallel_size - 1)
    if place.num_ranks == 1 and rendezvous:
        raise StepwireError("FIELD_INVALID", "a group of one meets nowhere", {"field": "rendezvous"})


def check_step_size(max_step_tokens: int, max_sequences: int) -> None:
    """Raises FIELD_OUT_OF_RANGE."""
    check_number("max_step_token_count", max_step_tokens, 1, MAX_STEP_TOKENS)
    check_number("max_sequence_count", max_sequences, 1, MAX_SEQUENCES)


def check_cache_size(num_tokens: int, max_model_len: int, model: LoadSummary, measured: Measured | None) -> None:
    """Whether a cache suits the model and fits. Raises FIELD_OUT_OF_RANGE, OUT_OF_MEMORY."""
    if 0 < model.max_position_count < max_model_len:
        raise out_of_range("max_model_len", str(max_model_len), f"at most the model's {model.max_position_count}")
    needed = num_tokens * model.kv_bytes_per_token
    if measured is not None and needed > measured.report.available_bytes:
        available = measured.report.available_bytes
        raise StepwireError(
            "OUT_OF_MEMORY",
            f"a KV cache of {num_tokens} tokens needs {needed} bytes and {available} are available",
            {"field": "block_count", "needed_bytes": str(needed), "available_bytes": str(available)},
        )
