"""Checkpoints of any tensors, for what reads tensors and asks little about the model."""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.tensors import TensorInfo
from tests.support.tiny_checkpoint import make_tiny_llama


def fake_checkpoint(tensors: Iterable[TensorInfo], *, tie: bool = False) -> Checkpoint:
    """A checkpoint of nothing but `tensors`. The model it tells of is the tiny Llama."""
    infos = {info.name: info for info in tensors}
    base = _tiny(tie=tie)
    return replace(base, tensors=infos, total_bytes=sum(info.num_bytes for info in infos.values()))


@cache
def _tiny(*, tie: bool) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        return open_checkpoint(make_tiny_llama(Path(folder) / "m", tie=tie))
