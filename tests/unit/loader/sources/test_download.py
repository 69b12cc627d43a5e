import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.errors import CheckpointError, LoadCancelled
from loader.sources import download as module
from loader.sources.download import Watch, download, present_bytes
from loader.sources.remote import RemoteFile, RemoteModel

DATA = {"a.json": b"{}", "m.safetensors": bytes(range(256)) * 100}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Source:
    """Serves DATA in parts of 1000 bytes. `fail_at` lists the offsets at which it fails, once each."""

    def __init__(self, fail_at: list[int] | None = None, data: dict[str, bytes] | None = None) -> None:
        self.fail_at = fail_at or []
        self.data = data or DATA
        self.reads: list[tuple[str, int]] = []

    def chunks(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        self.reads.append((file.name, start))
        data = self.data[file.name]
        for position in range(start, len(data), 1000):
            if file.name == "m.safetensors" and position in self.fail_at:
                self.fail_at.remove(position)
                raise ConnectionError("broken line")
            yield data[position : position + 1000]


def model(source: Source, hashes: dict[str, str] | None = None) -> RemoteModel:
    files = [RemoteFile(name, len(data), "1", (hashes or {}).get(name)) for name, data in DATA.items()]
    return RemoteModel("x://m", "m", files, source)


def watch(**options: Any) -> Watch:
    return Watch(**{"progress": lambda done, total: None, "cancelled": lambda: False, "pause_s": 0.0, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_brings_all_files_and_their_hashes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    sums = download(model(Source()), tmp_path, watch(progress=lambda *pair: told.append(pair)))
    assert contents(tmp_path) == DATA
    assert sums == {name: sha256(data) for name, data in DATA.items()}
    total = sum(map(len, DATA.values()))
    assert max(told) == (total, total)


def test_a_line_that_breaks_is_taken_up_where_it_broke(tmp_path: Path) -> None:
    source = Source([3000, 9000])
    download(model(source), tmp_path, watch())
    assert contents(tmp_path) == DATA
    assert [start for name, start in source.reads if name == "m.safetensors"] == [0, 3000, 9000]


def test_a_source_that_stays_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="broken line") as caught:
        download(model(Source([3000] * 100)), tmp_path, watch())
    assert caught.value.code == "unavailable"
    assert (tmp_path / "m.safetensors.part").stat().st_size == 3000


def test_the_next_call_goes_on_where_the_last_stopped(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors.part").write_bytes(DATA["m.safetensors"][:4567])
    source = Source()
    sums = download(model(source, {"m.safetensors": sha256(DATA["m.safetensors"])}), tmp_path, watch())
    assert ("m.safetensors", 4567) in source.reads
    assert contents(tmp_path) == DATA
    assert sums["m.safetensors"] == sha256(DATA["m.safetensors"])


def test_files_that_are_whole_are_not_read_again(tmp_path: Path) -> None:
    # What a download leaves that was interrupted between its two files.
    (tmp_path / "a.json").write_bytes(DATA["a.json"])
    (tmp_path / module._SUMS_NAME).write_text(json.dumps({"a.json": sha256(DATA["a.json"])}))
    source = Source()
    download(model(source), tmp_path, watch())
    assert source.reads == [("m.safetensors", 0)]
    assert contents(tmp_path) == DATA


def test_a_part_that_is_longer_than_the_file_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors.part").write_bytes(b"x" * 30_000)
    download(model(Source()), tmp_path, watch())
    assert contents(tmp_path) == DATA


def test_wrong_content_is_refused_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors.part").write_bytes(b"x" * 4567)
    with pytest.raises(CheckpointError, match="is not what its source announces") as caught:
        download(model(Source(), {"m.safetensors": sha256(DATA["m.safetensors"])}), tmp_path, watch())
    assert (caught.value.code, caught.value.expected) == ("invalid", sha256(DATA["m.safetensors"]))
    assert not (tmp_path / "m.safetensors.part").exists()
    download(model(Source(), {"m.safetensors": sha256(DATA["m.safetensors"])}), tmp_path, watch())
    assert contents(tmp_path) == DATA


def test_more_than_was_announced(tmp_path: Path) -> None:
    source = Source(data={**DATA, "m.safetensors": DATA["m.safetensors"] + b"x" * 5000})
    with pytest.raises(CheckpointError, match="is not what its source announces"):
        download(model(source), tmp_path, watch())


def test_less_than_was_announced(tmp_path: Path) -> None:
    source = Source(data={**DATA, "m.safetensors": DATA["m.safetensors"][:-1]})
    with pytest.raises(CheckpointError, match="ended after 25599 of 25600 bytes") as caught:
        download(model(source), tmp_path, watch())
    assert caught.value.code == "unavailable"


def test_it_can_be_cancelled(tmp_path: Path) -> None:
    with pytest.raises(LoadCancelled):
        download(model(Source()), tmp_path, watch(cancelled=lambda: True))
    assert "m.safetensors" not in contents(tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="make room for 25602 bytes") as caught:
        download(model(Source()), tmp_path, watch())
    assert (caught.value.code, caught.value.file) == ("unavailable", tmp_path)
    monkeypatch.undo()
    download(model(Source()), tmp_path, watch())
    assert contents(tmp_path) == DATA


def test_a_damaged_list_of_hashes_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / module._SUMS_NAME).write_text("[")
    download(model(Source()), tmp_path, watch())
    assert contents(tmp_path) == DATA


def test_present_bytes(tmp_path: Path) -> None:
    assert present_bytes(tmp_path / "missing") == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    assert present_bytes(tmp_path) == 3


def test_bytes_are_counted_while_another_moves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "inner" / "file").write_bytes(b"ab")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_bytes(b"abc")
    scandir = os.scandir

    def moved_just_before(path: str) -> Any:
        if Path(path) == tmp_path / "a" / "inner":
            (tmp_path / "a").rename(tmp_path.with_name("elsewhere"))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", moved_just_before)
    assert present_bytes(tmp_path) == 3
