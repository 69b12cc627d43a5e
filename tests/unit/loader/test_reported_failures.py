"""Checkpoints that people reported to break other engines, each under its project and number.

Each loads right here, or is refused by one error that says where and why, before any tensor is read.
"""

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.config import RopeConfig
from loader.errors import CheckpointError
from loader.tokenizer import load_tokenizer
from loader.weights import WeightSlice, load_weights
from tests.support.tiny_checkpoint import make_tiny_llama, tiny_tensors, write_safetensors
from tests.support.tiny_gguf import TINY_CONFIG, make_tiny_gguf

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Headers and configs of the tiny model have less, its tensors more.
MAX_READ_BYTES = 64 << 10


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], CheckpointError]:
    def check(path: Path) -> CheckpointError:
        num_read = 0
        real = os.pread

        def counted(descriptor: int, num_bytes: int, offset: int) -> bytes:
            nonlocal num_read
            data = real(descriptor, num_bytes, offset)
            num_read += len(data)
            return data

        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
            patch.setattr(os, "pread", counted)
            open_checkpoint(path)
        assert num_read < MAX_READ_BYTES
        assert caught.value.message and caught.value.remedy
        return caught.value

    return check


def load(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    wanted = [WeightSlice(name, info.shape) for name, info in checkpoint.tensors.items()]
    return load_weights(checkpoint, wanted, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)


def loads_right(folder: Path, files: tuple[str, ...]) -> None:
    loaded = load(open_checkpoint(folder))
    expected = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tied_with_head(folder: Path, *, same: bool) -> Path:
    """A checkpoint whose config says tied, with an output layer that is the embedding, or is not."""
    make_tiny_llama(folder, tie=True)
    tensors = tiny_tensors(TINY_CONFIG, seed=0, tie=True)
    head = tensors[EMBEDDING].copy()
    head[300, 5] += 0 if same else 1
    write_safetensors(folder / "model.safetensors", {**tensors, HEAD: head})
    return folder


# --- files and index


@pytest.mark.parametrize("num_missing", [1, 1000, 60_000])
def test_vllm_15445_truncated_shard(
    tmp_path: Path, refused: Callable[[Path], CheckpointError], num_missing: int
) -> None:
    shard = make_tiny_llama(tmp_path, sharded=True) / SHARDS[1]
    size = shard.stat().st_size
    os.truncate(shard, size - num_missing)
    error = refused(tmp_path)
    assert (error.code, error.file) == ("invalid", shard)
    assert (error.expected, error.found) == (f"{size} bytes", f"{size - num_missing} bytes")
    assert f"{num_missing} bytes are missing" in error.message


@pytest.mark.parametrize("damage", ["longer", "cut in the header", "all zeros", "bytes shifted"])
def test_qwen3_vl_264_corrupt_shard_published(
    tmp_path: Path, refused: Callable[[Path], CheckpointError], damage: str
) -> None:
    shard = make_tiny_llama(tmp_path, sharded=True) / SHARDS[0]
    data = shard.read_bytes()
    damaged = {
        "longer": data + b"\0" * 7,
        "cut in the header": data[:300],
        "all zeros": bytes(len(data)),
        "bytes shifted": data[1:] + b"\0",
    }
    shard.write_bytes(damaged[damage])
    error = refused(tmp_path)
    assert (error.code, error.file) == ("invalid", shard)


@pytest.mark.parametrize(
    ("content", "kind", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-LFS", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page", "download it again"),
        (b"PK\x03\x04" + bytes(100), "zip archive", "convert"),
    ],
)
def test_transformers_27923_and_omniparser_34_header_too_large(
    tmp_path: Path, refused: Callable[[Path], CheckpointError], content: bytes, kind: str, remedy: str
) -> None:
    shard = make_tiny_llama(tmp_path, sharded=True) / SHARDS[0]
    shard.write_bytes(content)
    error = refused(tmp_path)
    assert (error.code, error.file) == ("invalid", shard)
    assert kind in str(error.found)
    assert remedy in error.remedy


def test_vllm_34859_quantised_and_a_shard_missing(tmp_path: Path, refused: Callable[[Path], CheckpointError]) -> None:
    make_tiny_llama(tmp_path, sharded=True, config_overrides={"quantization_config": {"quant_method": "gptq"}})
    (tmp_path / SHARDS[1]).unlink()
    error = refused(tmp_path)
    assert (error.code, error.file) == ("not_found", tmp_path / SHARDS[1])


def test_sglang_32279_missing_shard_dropped_by_glob(tmp_path: Path, refused: Callable[[Path], CheckpointError]) -> None:
    make_tiny_llama(tmp_path, sharded=True)
    (tmp_path / INDEX).unlink()
    (tmp_path / SHARDS[0]).unlink()
    error = refused(tmp_path)
    assert (error.code, error.expected, error.found) == ("not_found", "2 files", "1 files")


def test_coser_3_index_names_more_shards_than_there_are(
    tmp_path: Path, refused: Callable[[Path], CheckpointError]
) -> None:
    make_tiny_llama(tmp_path, sharded=True)
    index = json.loads((tmp_path / INDEX).read_text())
    more = {f"model.layers.{n}.x": f"model-{n:05}-of-00030.safetensors" for n in range(3, 31)}
    change_json(tmp_path / INDEX, weight_map={**index["weight_map"], **more})
    error = refused(tmp_path)
    assert (error.code, error.expected, error.found) == ("not_found", "30 files", "2 files")
    assert error.file == tmp_path / "model-00003-of-00030.safetensors"


def test_vllm_4989_consolidated_beside_shards_without_index(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, sharded=True)
    (tmp_path / INDEX).unlink()
    write_safetensors(tmp_path / "consolidated.safetensors", {"layers.0.attention.wk.weight": np.ones((2, 2), "f4")})
    loads_right(tmp_path, SHARDS)


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "invalid", "git lfs pull"),
        (b"<html>", "invalid", "download it again"),
        (b"\x80\x02garbage", "unsupported", "convert"),
        (b"garbage", "unsupported", "convert"),
    ],
)
def test_vllm_337_bin_that_is_no_pickle(
    tmp_path: Path, refused: Callable[[Path], CheckpointError], content: bytes, code: str, text: str
) -> None:
    (make_tiny_llama(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    error = refused(tmp_path)
    assert (error.code, error.file) == (code, tmp_path / "pytorch_model.bin")
    assert text in error.remedy


# --- keys, shapes, config


def test_vllm_6758_tied_and_the_file_carries_the_head(tmp_path: Path) -> None:
    loads_right(tied_with_head(tmp_path, same=True), ("model.safetensors",))


@pytest.mark.parametrize("rows", [None, (288, 320)])
def test_vllm_6758_tied_and_the_head_is_another(tmp_path: Path, rows: tuple[int, int] | None) -> None:
    """Either could be meant; only the values tell."""
    checkpoint = open_checkpoint(tied_with_head(tmp_path, same=False))
    want = WeightSlice(EMBEDDING, (320, 64), None if rows is None else 0, *(rows or ()))
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, [want], dtype=torch.bfloat16, progress=lambda _: None, cancelled=lambda: False)
    error = caught.value
    assert (error.code, error.tensor, error.file) == ("invalid", HEAD, tmp_path / "model.safetensors")
    assert "row 300" in error.message
    assert "tie_word_embeddings" in error.remedy


def test_vllm_6758_tied_and_the_head_has_another_shape(
    tmp_path: Path, refused: Callable[[Path], CheckpointError]
) -> None:
    make_tiny_llama(tmp_path, tie=True)
    tensors = tiny_tensors(TINY_CONFIG, seed=0, tie=True)
    write_safetensors(tmp_path / "model.safetensors", {**tensors, HEAD: tensors[EMBEDDING][:319]})
    error = refused(tmp_path)
    assert (error.tensor, error.expected, error.found) == (HEAD, "[320, 64]", "[319, 64]")


def test_vllm_5621_tied_model_without_a_head(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf", tie=True)
    assert open_checkpoint(folder).config.tie_word_embeddings
    loads_right(folder, ("model.safetensors",))
    gguf = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", tie=True))
    assert gguf.config.tie_word_embeddings
    assert torch.equal(load(gguf)[EMBEDDING], load_file(folder / "model.safetensors")[EMBEDDING])


@pytest.mark.parametrize("flag", [False, None])
def test_qwen3_vl_embedding_89_not_tied_and_no_head(
    tmp_path: Path, refused: Callable[[Path], CheckpointError], flag: bool | None
) -> None:
    make_tiny_llama(tmp_path, tie=True, config_overrides={"tie_word_embeddings": flag})
    error = refused(tmp_path)
    assert (error.code, error.tensor, error.expected) == ("invalid", HEAD, "[320, 64]")
    assert "tie_word_embeddings" in error.remedy


def test_vllm_15124_embedding_resized_and_config_old(
    tmp_path: Path, refused: Callable[[Path], CheckpointError]
) -> None:
    change_json(make_tiny_llama(tmp_path) / "config.json", vocab_size=300)
    error = refused(tmp_path)
    assert (error.tensor, error.expected, error.found) == (EMBEDDING, "[300, 64]", "[320, 64]")
    assert error.file == tmp_path / "model.safetensors"
    assert "set vocab_size to 320" in error.remedy


@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
def test_vllm_9481_and_8855_rope_type_under_either_key(tmp_path: Path, keys: tuple[str, ...]) -> None:
    scaling = {**dict.fromkeys(keys, "linear"), "factor": 4.0}
    folder = make_tiny_llama(tmp_path, config_overrides={"rope_scaling": scaling})
    assert open_checkpoint(folder).config.rope == RopeConfig(10000.0, "linear", {"factor": 4.0})


def test_vllm_31444_no_tokenizer_in_the_directory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(checkpoint)
    assert (caught.value.code, caught.value.file) == ("not_found", tmp_path / "tokenizer.json")
    assert "save_pretrained" in caught.value.remedy


# --- memory


def test_sglang_22701_and_vllm_41749_reused_buffers(tmp_path: Path) -> None:
    """What was loaded first is still right after all was loaded, and no two tensors share memory."""
    folder = make_tiny_llama(tmp_path, sharded=True)
    loaded = load(open_checkpoint(folder))
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in loaded.values())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    shutil.rmtree(folder)  # nor do they share it with the files
    expected = tiny_tensors(TINY_CONFIG, seed=0, tie=False)
    assert all(torch.equal(loaded[name], torch.from_numpy(tensor)) for name, tensor in expected.items())
