import hashlib
from pathlib import Path

import pytest

from loader.errors import CheckpointError
from loader.sources.hub import HubId, hub_model, hub_snapshot
from tests.support.file_server import COMMIT, FileServer, keep_snapshot

WANTED = HubId("org/tiny")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/name@v1.0", HubId("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("org/name/sub/m-Q4_0.gguf@main", HubId("org/name", "main", "sub/m-Q4_0.gguf")),
    ],
)
def test_ids(text: str, expected: HubId) -> None:
    assert HubId.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "../b", "a/..", "a/b@", "a b/c", "-a/b", "a--b/c", "a/b/../c.gguf", ""]
)
def test_what_is_no_id(text: str) -> None:
    assert HubId.parse(text) is None


def test_what_the_hub_has(hub: FileServer, tiny_files: dict[str, bytes]) -> None:
    model, commit = hub_model(WANTED)
    assert (commit, model.url, model.label) == (COMMIT, f"hf://org/tiny@{COMMIT}", "tiny")
    assert {file.name for file in model.files} == set(tiny_files)
    for file in model.files:
        data = tiny_files[file.name]
        assert b"".join(model.reader.chunks(file, 0)) == data
        known = hashlib.sha256(data).hexdigest() if file.name.endswith(".safetensors") else None
        assert (file.num_bytes, file.sha256) == (len(data), known)


def test_the_token_is_sent(hub: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    model, _ = hub_model(WANTED)
    hub.tokens.clear()
    b"".join(model.reader.chunks(model.files[0], 0))
    assert hub.tokens == ["Bearer hf_secret"]
    assert "hf_secret" not in repr(model)


def test_one_gguf_of_several(hub: FileServer) -> None:
    hub.publish("org/quants", {"a.gguf": b"GGUFa", "b.gguf": b"GGUFb", "README.md": b""})
    model, _ = hub_model(HubId("org/quants", "main", "b.gguf"))
    assert [file.name for file in model.files] == ["b.gguf"]
    with pytest.raises(CheckpointError, match="name one of them") as caught:
        hub_model(HubId("org/quants"))
    suggested = caught.value.remedy.rpartition(" ")[2]
    assert HubId.parse(suggested) == HubId("org/quants", "main", "a.gguf")
    with pytest.raises(CheckpointError, match=r"has no file c\.gguf"):
        hub_model(HubId("org/quants", "main", "c.gguf"))


def test_a_model_that_is_not_there(hub: FileServer) -> None:
    with pytest.raises(CheckpointError, match="no model org/none@main") as caught:
        hub_model(HubId("org/none"))
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_no_network(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(CheckpointError, match="cannot be asked for org/tiny@main") as caught:
        hub_model(WANTED)
    assert caught.value.code == "unavailable"


def test_a_hub_that_fails(hub: FileServer) -> None:
    hub.status["/api/models/org/tiny/revision/main"] = 500
    with pytest.raises(CheckpointError) as caught:
        hub_model(WANTED)
    assert caught.value.code == "unavailable"


# --- huggingface_hub's own cache


def test_a_snapshot(hub_cache: Path, tiny_files: dict[str, bytes]) -> None:
    assert hub_snapshot(WANTED, "main") is None
    snapshot = keep_snapshot(hub_cache, "org/tiny", tiny_files)
    assert hub_snapshot(WANTED, "main") == snapshot
    assert hub_snapshot(WANTED, COMMIT) == snapshot
    assert hub_snapshot(WANTED, "v1.0") is None


def test_a_snapshot_that_is_not_whole(hub_cache: Path, tiny_files: dict[str, bytes]) -> None:
    snapshot = keep_snapshot(hub_cache, "org/tiny", tiny_files)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert hub_snapshot(WANTED, "main") is None


def test_a_snapshot_is_held_against_what_the_hub_has(
    hub: FileServer, hub_cache: Path, tiny_files: dict[str, bytes]
) -> None:
    snapshot = keep_snapshot(hub_cache, "org/tiny", tiny_files)
    files = hub_model(WANTED)[0].files
    (snapshot / "generation_config.json").unlink()  # not needed
    assert hub_snapshot(WANTED, COMMIT, files) == snapshot
    (snapshot / "model-00001-of-00002.safetensors").resolve().write_bytes(b"short")
    assert hub_snapshot(WANTED, COMMIT, files) is None


def test_a_gguf_of_a_snapshot(hub_cache: Path) -> None:
    snapshot = keep_snapshot(hub_cache, "org/tiny", {"m.gguf": b"GGUF", "n.gguf": b"GGUFn"})
    assert hub_snapshot(HubId("org/tiny", "main", "m.gguf"), "main") == snapshot / "m.gguf"
