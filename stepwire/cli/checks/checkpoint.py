"""Whether the checkpoint can be served and can fit, and whether logs can be written."""

import os
from pathlib import Path

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.inspection import Wish, inspect_checkpoint
from stepwire.cli.checks.finding import Finding, human_bytes
from stepwire.cli.checks.memory import Memory


def check_checkpoint(model: str | None, memory: Memory | None, wish: Wish, *, on_cpu: bool) -> Finding:
    """Holds the checkpoint against the settings as a start does, from headers."""
    if model is None:
        return Finding("ok", "checkpoint", "none given; --model checks one")
    path = Path(model).expanduser()
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return Finding("fail", "checkpoint", error.message, error.remedy)
    found = inspect_checkpoint(checkpoint, wish)
    for problem in found.problems:
        return Finding("fail", "checkpoint", problem.message, problem.remedy)
    size = human_bytes(checkpoint.total_bytes)
    kind = f"{checkpoint.config.architecture}, {checkpoint.format}"
    text = f"{path.name}: {kind}, {len(checkpoint.tensors)} tensors, {size}"
    resident = sum(rank.resident_bytes for rank in found.ranks)
    if on_cpu and memory is not None and resident > memory.usable:
        text += f", {human_bytes(resident)} in memory"
        remedy = f"{human_bytes(memory.usable)} are usable: free some, or serve a smaller or quantised checkpoint"
        return Finding("fail", "checkpoint", text, remedy)
    return Finding("ok", "checkpoint", text)


def check_log_dir(folder: str) -> Finding:
    """Whether worker logs can be written. Looks at the nearest folder that exists; makes none."""
    path = Path(folder).expanduser()
    existing = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding("ok", "logs", f"go to {path}")
    return Finding("fail", "logs", f"{path} cannot be written", "choose another folder with --log-dir")
