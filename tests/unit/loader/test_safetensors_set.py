import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.errors import CheckpointError
from loader.safetensors_set import find_safetensors
from tests.support.tiny_checkpoint import make_tiny_llama, write_safetensors

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path, sharded=True)


def change_index(folder: Path, **changes: Any) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    index.update(changes)
    (folder / INDEX).write_text(json.dumps(index))
    return index


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find_safetensors(folder)
    return caught.value


def names(folder: Path) -> list[str]:
    files = find_safetensors(folder)
    assert files is not None
    return [file.path.name for file in files]


def test_index_joins_shards(folder: Path) -> None:
    files = find_safetensors(folder)
    assert files is not None
    found = {tensor.name for file in files for tensor in file.tensors}
    assert found == set(json.loads((folder / INDEX).read_text())["weight_map"])


def test_no_safetensors_at_all(tmp_path: Path) -> None:
    assert find_safetensors(tmp_path) is None


def test_complete_shards_need_no_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert names(folder) == [FIRST, SECOND]


def test_index_decides_and_other_files_are_ignored(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")
    (folder / "leftover.safetensors").write_bytes(b"not even a header")
    assert names(folder) == [FIRST, SECOND]


def test_single_file_goes_before_strays(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"x")
    (tmp_path / "stray.safetensors").write_bytes(b"x")
    assert names(tmp_path) == ["model.safetensors"]


def test_only_consolidated(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": np.ones(1, np.float32)})
    assert refused(tmp_path).code == "unsupported"


def test_shard_in_a_subdirectory(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / SECOND).rename(folder / "parts" / SECOND)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    moved = {name: f"parts/{file}" if file == SECOND else file for name, file in weight_map.items()}
    change_index(folder, weight_map=moved)
    assert names(folder) == [FIRST, SECOND]


def test_missing_shard_with_index(folder: Path) -> None:
    (folder / SECOND).unlink()
    error = refused(folder)
    assert error.code == "not_found"
    assert SECOND in error.message
    assert error.file == folder / SECOND


def test_missing_shard_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / FIRST).unlink()
    (folder / SECOND).rename(folder / "model-00003-of-00003.safetensors")
    (folder / "model-00001-of-00003.safetensors").write_bytes(
        (folder / "model-00003-of-00003.safetensors").read_bytes()
    )
    error = refused(folder)
    assert error.code == "not_found"
    assert "number 2 is missing" in error.message


def test_unrelated_files_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SECOND).rename(folder / "other.safetensors")
    assert INDEX in refused(folder).remedy


def test_tensor_in_two_shards(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())
    error = refused(folder)
    assert error.tensor is not None
    assert FIRST in error.message
    assert SECOND in error.message


def test_index_maps_a_tensor_to_the_wrong_file(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    weight_map["model.embed_tokens.weight"] = SECOND
    change_index(folder, weight_map=weight_map)
    error = refused(folder)
    assert error.tensor == "model.embed_tokens.weight"
    assert error.found == FIRST


def test_index_omits_a_tensor(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    change_index(folder, weight_map=weight_map)
    assert refused(folder).tensor == "model.norm.weight"


def test_index_announces_another_size(folder: Path) -> None:
    change_index(folder, metadata={"total_size": 5})
    assert refused(folder).expected == "5"


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": None}, "x"])
def test_total_size_may_be_absent(folder: Path, metadata: Any) -> None:
    change_index(folder, metadata=metadata)
    assert names(folder) == [FIRST, SECOND]


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", 5, None, "a\0b"])
def test_index_cannot_lead_out_of_the_folder(folder: Path, name: Any) -> None:
    change_index(folder, weight_map={"a": name})
    assert refused(folder).tensor == "a"


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(folder: Path, weight_map: Any) -> None:
    change_index(folder, weight_map=weight_map)
    assert "weight_map" in refused(folder).message


def test_index_that_is_an_lfs_pointer(folder: Path) -> None:
    (folder / INDEX).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git-LFS" in refused(folder).message
