import hashlib
import json
import os
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.known_hashes import KnownHashes
from tests.support.tiny_checkpoint import make_tiny_llama

SUM = "ab" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    path.touch()
    return path


def test_none_is_known(file: Path) -> None:
    assert KnownHashes().of(file) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SHA256SUMS", f"{'00' * 32}  other.safetensors\n{SUM}  model.safetensors\n"),
        ("SHA256SUMS", f"{SUM.upper()} *model.safetensors"),
        ("SHA256SUMS", f"{SUM}  ./model.safetensors\r\n"),
        ("sha256sums.txt", f"{SUM}  model.safetensors\n"),
        ("model.safetensors.sha256", SUM),
        ("model.safetensors.sha256", f"{SUM}  model.safetensors\n"),
        ("stepwire.json", json.dumps({"files": {"model.safetensors": {"sha256": SUM}}})),
        ("../entry.json", json.dumps({"files": {"model.safetensors": {"sha256": SUM, "bytes": 0}}})),
    ],
)
def test_a_list_beside_the_file(file: Path, name: str, text: str) -> None:
    (file.parent / name).write_text(text)
    assert KnownHashes().of(file) == SUM


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SHA256SUMS", f"{SUM}  folder/model.safetensors"),
        ("SHA256SUMS", f"{SUM}00  model.safetensors"),
        ("SHA256SUMS", f"{SUM}"),
        ("stepwire.json", "{"),
        ("stepwire.json", json.dumps({"files": ["model.safetensors"]})),
        ("stepwire.json", json.dumps({"files": {"model.safetensors": {"sha256": "../../etc/passwd"}}})),
        ("../entry.json", "[]"),
    ],
)
def test_what_tells_nothing(file: Path, name: str, text: str) -> None:
    (file.parent / name).write_text(text)
    assert KnownHashes().of(file) is None


def test_the_hub_caches_names(tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / SUM, tmp_path / "snapshots" / "c0ffee" / "model.safetensors"
    blob.parent.mkdir()
    blob.touch()
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    assert KnownHashes().of(link) == KnownHashes().of(blob) == SUM
    short = blob.with_name("ab" * 20)  # a small file's name is its git SHA-1, which is another thing
    short.touch()
    link.unlink()
    link.symlink_to(short)
    assert KnownHashes().of(link) is None


def test_a_known_hash_makes_copies_alike(tmp_path: Path) -> None:
    """As on two machines: the same files, changed at other times."""
    folders = [make_tiny_llama(tmp_path / name) for name in ("one", "two")]
    os.utime(folders[1] / "model.safetensors", ns=(1, 1))
    assert open_checkpoint(folders[0]).fingerprint != open_checkpoint(folders[1]).fingerprint
    for folder in folders:
        sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        (folder / "SHA256SUMS").write_text(f"{sha256}  model.safetensors\n")
    assert open_checkpoint(folders[0]).fingerprint == open_checkpoint(folders[1]).fingerprint
    (folders[1] / "SHA256SUMS").write_text(f"{SUM}  model.safetensors\n")
    assert open_checkpoint(folders[0]).fingerprint != open_checkpoint(folders[1]).fingerprint
