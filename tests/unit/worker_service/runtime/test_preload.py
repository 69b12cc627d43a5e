import dataclasses
import os
from pathlib import Path

import pytest
import torch

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.shares import RankPlace
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.preload import check_before_load

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_llama(tmp_path / "m"))


def test_a_rank_that_can_load_is_told_its_needs_and_nothing_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", None)
    whole = check_before_load(checkpoint, RankPlace(), torch.float32, CPU, 2**30)
    half = check_before_load(checkpoint, RankPlace(1, 2), torch.bfloat16, CPU, 2**30)
    assert whole.weight_bytes == checkpoint.total_bytes
    assert half.weight_bytes < whole.weight_bytes / 3


def test_weights_beyond_the_limit_are_refused_with_both_numbers(checkpoint: Checkpoint) -> None:
    needed = checkpoint.total_bytes
    check_before_load(checkpoint, RankPlace(), torch.float32, CPU, needed)
    with pytest.raises(RuntimeFailure) as caught:
        check_before_load(checkpoint, RankPlace(), torch.float32, CPU, needed - 1)
    assert caught.value.code == "out_of_memory"
    assert caught.value.metadata["needed_bytes"] == str(needed)
    assert "raise memory_fraction" in str(caught.value)


def test_a_tensor_that_is_missing_is_named(checkpoint: Checkpoint) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {other: info for other, info in checkpoint.tensors.items() if other != name}
    with pytest.raises(CheckpointError) as caught:
        check_before_load(dataclasses.replace(checkpoint, tensors=rest), RankPlace(), torch.float32, CPU, 2**30)
    assert (caught.value.code, caught.value.tensor) == ("invalid", name)


def test_a_size_that_cannot_split_the_model_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(RuntimeFailure, match="cannot be split"):
        check_before_load(checkpoint, RankPlace(0, 3), torch.float32, CPU, 2**30)
