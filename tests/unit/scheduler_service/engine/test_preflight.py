from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.inspection import Wish
from scheduler_service.engine.preflight import check_before_start
from stepwire.rpc.errors import StepwireError
from tests.support.tiny_checkpoint import make_tiny_llama


def cut_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def nothing(folder: Path) -> None:
    del folder


def test_a_checkpoint_that_can_be_served_is_opened(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path)
    assert check_before_start(str(path), Wish(max_model_len=64, num_kv_blocks=4)).path == path


@pytest.mark.parametrize(
    ("damage", "wish", "reason", "words", "file"),
    [
        (cut_shard, {}, "CHECKPOINT_INVALID", "10 bytes are missing", "model-00002-of-00002.safetensors"),
        (no_tokenizer, {}, "CHECKPOINT_NOT_FOUND", "no tokenizer.json", "tokenizer.json"),
        (nothing, {"tensor_parallel_size": 3}, "FIELD_INVALID", "use one of tp 1, 2, 4", None),
        (nothing, {"pipeline_parallel_size": 3}, "FIELD_INVALID", "pp of 1 to 2", None),
        (nothing, {"max_model_len": 513}, "FIELD_OUT_OF_RANGE", "at most 512", None),
        (nothing, {"num_kv_blocks": 31}, "OUT_OF_MEMORY", "lower max_model_len to at most 496", None),
    ],
)
def test_a_problem_is_one_error_of_the_phase_check(
    tmp_path: Path, damage: Callable[[Path], None], wish: dict[str, Any], reason: str, words: str, file: str | None
) -> None:
    damage(make_tiny_llama(tmp_path, sharded=True))
    with pytest.raises(StepwireError) as caught:
        check_before_start(str(tmp_path), Wish(**wish))
    error = caught.value
    assert error.reason == reason
    assert words in error.message
    assert error.metadata["phase"] == "check"
    assert error.metadata["remedy"] in error.message
    assert error.metadata.get("file") == (None if file is None else str(tmp_path / file))
    assert all(error.metadata.values())


def test_what_else_is_wrong_is_counted(tmp_path: Path) -> None:
    no_tokenizer(make_tiny_llama(tmp_path))
    with pytest.raises(StepwireError, match=r"no tokenizer\.json.*tells of 2 more"):
        check_before_start(str(tmp_path), Wish(3, max_model_len=513))
