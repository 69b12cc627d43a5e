"""The check before any phase: whether the checkpoint can be served as the settings say. Reads headers only."""

from collections.abc import Mapping
from pathlib import Path

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.inspection import Problem, Wish, inspect_checkpoint
from scheduler_service.model_settings import ModelSettings
from stepwire.rpc.errors import StepwireError

PHASE = "check"
# The loader's word for what is wrong -> the reason of the error.
_REASONS: Mapping[str, str] = {
    "not_found": "CHECKPOINT_NOT_FOUND",
    "unavailable": "CHECKPOINT_UNAVAILABLE",
    "invalid": "CHECKPOINT_INVALID",
    "unsupported": "CHECKPOINT_UNSUPPORTED",
    "tensor_parallel": "FIELD_INVALID",
    "pipeline_parallel": "FIELD_INVALID",
    "max_model_len": "FIELD_OUT_OF_RANGE",
    "out_of_memory": "OUT_OF_MEMORY",
}


def wish_of(settings: ModelSettings) -> Wish:
    """What is known of how the model is to be served before a worker says what memory it has."""
    return Wish(
        tensor_parallel_size=settings.tp,
        pipeline_parallel_size=settings.pp,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        # Then there is no number too small: the context becomes shorter.
        num_kv_blocks=None if settings.fit_max_model_len else settings.num_kv_blocks,
        block_size=settings.block_size,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
    )


def check_before_start(path: str, wish: Wish) -> Checkpoint:
    """Opens the checkpoint and holds it against the wish, as `stepwire check` does. Blocks on files.

    Raises StepwireError, of the phase "check", for the first problem: its metadata has file, tensor, expected, found
    and remedy where they apply.
    """
    try:
        checkpoint = open_checkpoint(Path(path))
    except CheckpointError as error:
        raise check_failed(Problem.of(error)) from error
    problems = inspect_checkpoint(checkpoint, wish).problems
    if problems:
        raise check_failed(problems[0], num_more=len(problems) - 1)
    return checkpoint


def check_failed(problem: Problem, *, phase: str = PHASE, num_more: int = 0) -> StepwireError:
    """The error for a problem, and how many more there are."""
    known = {
        "phase": phase,
        "file": problem.file,
        "tensor": problem.tensor,
        "expected": problem.expected,
        "found": problem.found,
        "remedy": problem.remedy,
    }
    metadata = {key: value for key, value in known.items() if value is not None}
    more = f" (stepwire check tells of {num_more} more)" if num_more else ""
    text = f"{problem.message}; {problem.remedy}{more}"
    return StepwireError(_REASONS.get(problem.code, "CHECKPOINT_INVALID"), text, metadata)
