from collections.abc import Iterator

import pytest

from loader.errors import CheckpointError
from loader.sources.http import HttpReader, http_model
from loader.sources.remote import RemoteFile
from tests.support.file_server import FileServer, serve_files


@pytest.fixture
def served(server: FileServer, tiny_files: dict[str, bytes]) -> FileServer:
    server.files = {f"/m/{name}": data for name, data in tiny_files.items()}
    return server


def test_the_files_are_found_by_name_and_index(served: FileServer, tiny_files: dict[str, bytes]) -> None:
    model = http_model(f"{served.url}/m/")
    assert {file.name: file.num_bytes for file in model.files} == {n: len(d) for n, d in tiny_files.items()}
    assert (model.url, model.label) == (f"{served.url}/m", "m")


def test_one_gguf(server: FileServer) -> None:
    server.files["/q/m.gguf"] = b"GGUF1234"
    model = http_model(f"{server.url}/q/m.gguf")
    assert [(file.name, file.num_bytes) for file in model.files] == [("m.gguf", 8)]
    assert b"".join(model.reader.chunks(model.files[0], 4)) == b"1234"


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("start", [0, 1, 5_000_000])
def test_reading_from_the_middle(server: FileServer, ranges: bool, start: int) -> None:
    data = bytes(range(256)) * 40_000
    server.files["/x"], server.ranges = data, ranges
    reader = HttpReader(server.url)
    file = reader.find("x")
    assert file is not None
    assert b"".join(reader.chunks(file, start)) == data[start:]


def test_a_file_that_changed_meanwhile(server: FileServer) -> None:
    server.files["/x"] = b"old"
    reader = HttpReader(server.url)
    file = reader.find("x")
    assert file is not None
    server.files["/x"] = b"new"
    with pytest.raises(CheckpointError, match="changed while it was read"):
        next(reader.chunks(file, 0))


def test_a_file_that_is_gone(server: FileServer) -> None:
    with pytest.raises(CheckpointError) as caught:
        next(HttpReader(server.url).chunks(RemoteFile("x", 3), 0))
    assert caught.value.code == "not_found"


def test_an_answer_that_breaks_off_is_as_long_as_it_is(server: FileServer) -> None:
    server.files["/x"], server.break_after["x"] = b"12345678", 5
    assert b"".join(HttpReader(server.url).chunks(RemoteFile("x", 8), 0)) == b"12345"


def test_an_index_that_names_a_missing_shard(served: FileServer) -> None:
    del served.files["/m/model-00002-of-00002.safetensors"]
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors does not exist"):
        http_model(f"{served.url}/m")


@pytest.mark.parametrize("status", [401, 403])
def test_no_access(served: FileServer, status: int) -> None:
    served.status["/m/config.json"] = status
    with pytest.raises(CheckpointError, match=f"HTTP {status}") as caught:
        http_model(f"{served.url}/m")
    assert caught.value.code == "unavailable"


def test_a_server_that_fails(served: FileServer) -> None:
    served.status["/m/config.json"] = 500
    with pytest.raises(CheckpointError, match="cannot be reached") as caught:
        http_model(f"{served.url}/m")
    assert caught.value.code == "unavailable"


def test_no_server() -> None:
    with pytest.raises(CheckpointError, match="cannot be reached") as caught:
        http_model("http://127.0.0.1:1/m")
    assert caught.value.code == "unavailable"


def test_credentials_in_the_url(server: FileServer) -> None:
    with pytest.raises(CheckpointError, match="credentials in a URL"):
        http_model("http://me:secret@127.0.0.1:1/m")


@pytest.fixture
def other() -> Iterator[FileServer]:
    with serve_files() as served:
        yield served


def test_a_token_stays_with_its_host(server: FileServer, other: FileServer) -> None:
    other.files["/store/x"] = b"123"
    server.redirects["/x"] = f"{other.url}/store/x"
    reader = HttpReader(server.url, {"Authorization": "Bearer secret"})
    assert b"".join(reader.chunks(RemoteFile("x", 3), 0)) == b"123"
    assert (server.tokens, other.tokens) == (["Bearer secret"], [None])


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1:1/x"])
def test_redirects_lead_nowhere_else(server: FileServer, target: str) -> None:
    server.redirects["/x"] = target
    with pytest.raises(OSError, match="HTTP Error 302"):
        next(HttpReader(server.url).chunks(RemoteFile("x", 3), 0))
