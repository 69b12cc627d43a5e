import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.message
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("sharded", [False, True])
def test_opens_safetensors(tmp_path: Path, sharded: bool) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, sharded=sharded, dtype="bfloat16"))
    assert checkpoint.format == "safetensors"
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.total_bytes == sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert checkpoint.tensors["model.norm.weight"].shape == (64,)


def test_opens_a_gguf_and_its_folder(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "model.gguf")
    assert open_checkpoint(path) == open_checkpoint(tmp_path)
    assert open_checkpoint(path).format == "gguf"


def test_both_formats_agree_on_the_model(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf", max_position_count=512)
    gguf = make_tiny_gguf(tmp_path / "model.gguf")
    from_folder, from_gguf = open_checkpoint(folder), open_checkpoint(gguf)
    assert from_folder.config == from_gguf.config
    shapes = [{name: info.shape for name, info in one.tensors.items()} for one in (from_folder, from_gguf)]
    assert shapes[0] == shapes[1]


def test_gguf_ending_is_not_needed(tmp_path: Path) -> None:
    assert open_checkpoint(make_tiny_gguf(tmp_path / "blob")).format == "gguf"


def test_gguf_beside_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_tiny_gguf(tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).format == "gguf"


def test_links_are_followed(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert open_checkpoint(tmp_path / "snapshot").config.vocab_size == 320


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    first = open_checkpoint(folder).fingerprint
    assert open_checkpoint(folder).fingerprint == first
    status = (folder / "model.safetensors").stat()
    make_tiny_llama(folder, seed=1)
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = open_checkpoint(folder).fingerprint
    assert second != first
    change_config(folder, rope_theta=20000.0)
    assert open_checkpoint(folder).fingerprint not in (first, second)


def test_wrong_path(tmp_path: Path) -> None:
    error = refused(tmp_path / "nowhere")
    assert error.code == "not_found"
    assert "does not exist" in error.message


def test_hub_name_in_place_of_a_path() -> None:
    assert "download it first" in refused(Path("no-such-org/no-such-model")).remedy


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user/model"])
def test_unusable_path(path: str) -> None:
    assert refused(Path(path)).code == "not_found"


def test_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "link to nothing" in refused(tmp_path / "link").message


def test_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe").code == "invalid"


def test_empty_directory(tmp_path: Path) -> None:
    error = refused(tmp_path)
    assert error.code == "not_found"
    assert "is empty" in error.message


def test_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "no checkpoint" in refused(tmp_path).message


def test_directory_above_the_checkpoint(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "model")
    assert str(tmp_path / "model") in refused(tmp_path).remedy


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 100])
def test_file_that_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.txt").write_bytes(content)
    assert "is not a checkpoint" in refused(tmp_path / "model.txt").message


def test_lfs_pointer_in_place_of_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    error = refused(tmp_path / "m.gguf")
    assert "git-LFS" in error.message
    assert "git lfs pull" in error.remedy


def test_lfs_pointer_in_place_of_weights(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    error = refused(folder)
    assert error.file == folder / "model.safetensors"
    assert "git-LFS" in error.message


def test_one_file_of_a_directory(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    assert str(tmp_path) in refused(tmp_path / "model.safetensors").remedy


def test_config_without_weights(tmp_path: Path) -> None:
    (make_tiny_llama(tmp_path) / "model.safetensors").unlink()
    assert "no weights" in refused(tmp_path).message


def test_weights_without_config(tmp_path: Path) -> None:
    (make_tiny_llama(tmp_path) / "config.json").unlink()
    assert refused(tmp_path).file == tmp_path / "config.json"


def test_adapter_in_place_of_a_model(tmp_path: Path) -> None:
    (make_tiny_llama(tmp_path) / "config.json").rename(tmp_path / "adapter_config.json")
    assert "LoRA adapter" in refused(tmp_path).message


def test_only_pickled_weights(tmp_path: Path) -> None:
    (make_tiny_llama(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    error = refused(tmp_path)
    assert error.code == "unsupported"
    assert "save_pretrained" in error.remedy


def test_two_ggufs(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "a.gguf")
    make_tiny_gguf(tmp_path / "b.gguf")
    error = refused(tmp_path)
    assert "a.gguf, b.gguf" in error.message


def test_invalid_json_config(tmp_path: Path) -> None:
    (make_tiny_llama(tmp_path) / "config.json").write_text('{"architectures": [')
    error = refused(tmp_path)
    assert (error.code, error.file) == ("invalid", tmp_path / "config.json")


def test_unknown_architecture(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, config_overrides={"architectures": ["BertForMaskedLM"]})
    error = refused(tmp_path)
    assert error.code == "unsupported"
    assert error.found == "BertForMaskedLM"


def test_missing_shard(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, sharded=True)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert refused(tmp_path).code == "not_found"


def test_truncated_weights(tmp_path: Path) -> None:
    file = make_tiny_llama(tmp_path) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert "1 bytes are missing" in refused(tmp_path).message


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_missing_tensor(tmp_path: Path) -> None:
    change_config(make_tiny_llama(tmp_path, num_layers=2), num_hidden_layers=3)
    error = refused(tmp_path)
    assert error.tensor is not None
    assert error.tensor.startswith("model.layers.2.")


def test_missing_head_names_the_flag(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie=True, config_overrides={"tie_word_embeddings": False})
    error = refused(tmp_path)
    assert error.tensor == "lm_head.weight"
    assert "tie_word_embeddings" in error.remedy


def test_wrong_shape(tmp_path: Path) -> None:
    change_config(make_tiny_llama(tmp_path), vocab_size=321)
    error = refused(tmp_path)
    assert (error.expected, error.found) == ("[321, 64]", "[320, 64]")


def test_more_layers_than_the_config_says(tmp_path: Path) -> None:
    change_config(make_tiny_llama(tmp_path), num_hidden_layers=1)
    error = refused(tmp_path)
    assert error.tensor is not None
    assert error.tensor.startswith("model.layers.1.")


def test_storage_type_we_do_not_read(tmp_path: Path) -> None:
    file = make_tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    assert refused(tmp_path).found == "I32"


def test_unreadable_file(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "not a regular file" in refused(tmp_path).message


def test_needs_no_torch(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "hf")
    make_tiny_gguf(tmp_path / "m.gguf")
    program = (
        "import sys; from pathlib import Path; from loader.checkpoint import open_checkpoint; "
        "from loader.tokenizer import load_tokenizer; "
        "[load_tokenizer(open_checkpoint(Path(path))) for path in sys.argv[1:]]; "
        "print(sorted({'torch', 'numpy', 'grpc', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "hf"), str(tmp_path / "m.gguf")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
