"""An entry's name: it differs when anything that shapes the weights does."""

import os
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.shares import RankPlace
from loader.store.key import EntryKey, code_digest, content_of, cpu_features
from tests.support.restart_store import KEY, key
from tests.support.tiny_checkpoint import make_tiny_llama

OTHERS = {
    "content": ["d" * 64],
    "place": [RankPlace(0, 2), RankPlace(1, 2), RankPlace(0, 1, 0, 2), RankPlace(0, 1, 1, 2)],
    "dtype": ["float32"],
    "quantisation": ["int8"],
    "layout": ["plain-2"],
    "code": ["0.1.0-12345679"],
    "machine": ["x86_64-abcdef02"],
}


def test_every_part_changes_the_name() -> None:
    assert set(OTHERS) == {field.name for field in fields(EntryKey)}
    keys = [KEY, *(key(**{part: value}) for part, values in OTHERS.items() for value in values)]
    assert len({key.name for key in keys}) == len(keys)
    assert all(len(key.name) == 32 and set(key.name) <= set("0123456789abcdef") for key in keys)


def test_a_key_survives_json() -> None:
    assert EntryKey.from_json(KEY.as_json()) == KEY


@pytest.mark.parametrize(
    "change",
    [
        {"place": None},
        {"place": {"tensor_rank": 1, "tensor_parallel_size": 1}},
        {"place": {"tensor_rank": True}},
        {"place": {"colour": 1}},
        {"dtype": 5},
        {"dtype": "x" * 10_000},
        {"more": "parts"},
    ],
)
def test_other_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        EntryKey.from_json({**KEY.as_json(), **change})


def test_same_shapes_and_times_with_other_weights_differ(tmp_path: Path) -> None:
    paths = [make_tiny_llama(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1))]
    for path in paths:
        os.utime(path / "model.safetensors", ns=(10**18, 10**18))
    first, second = map(open_checkpoint, paths)
    assert first.fingerprint == second.fingerprint, "the case this is about"
    assert content_of(first) != content_of(second)
    assert content_of(first) == content_of(open_checkpoint(paths[0]))


def test_weights_put_in_place_of_others_differ(tmp_path: Path) -> None:
    path, other = make_tiny_llama(tmp_path / "a", seed=0), make_tiny_llama(tmp_path / "b", seed=1)
    weights = path / "model.safetensors"
    before, times = content_of(open_checkpoint(path)), weights.stat()
    # Into the same file, with the times of the old one.
    shutil.copyfile(other / "model.safetensors", weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_ino == times.st_ino
    assert content_of(open_checkpoint(path)) != before


def test_cpu_features_differ_with_the_flags_and_not_with_their_order(tmp_path: Path) -> None:
    found = []
    for number, flags in enumerate(("avx2 amx_int8", "amx_int8 avx2", "avx2")):
        cpuinfo = tmp_path / str(number)
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        found.append(cpu_features(cpuinfo))
    assert found[0] == found[1] != found[2]
    assert cpu_features(tmp_path / "none")


def test_the_code_digest_sees_sources_and_libraries(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    folders = {"a": tmp_path / "a"}
    first = code_digest(folders, "0.1.0")
    assert first == code_digest(folders, "0.1.0") and first.startswith("0.1.0-")
    (tmp_path / "a" / "x.py").write_text("2")
    second = code_digest(folders, "0.1.0")
    (tmp_path / "a" / "y.so").write_bytes(b"3")
    assert len({first, second, code_digest(folders, "0.1.0"), code_digest(folders, "0.2.0")}) == 4
