"""`stepwire cache`: what was brought here, and how to be rid of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.sources.cache import Asking, Held, ModelCache
from loader.sources.remote import RemoteFile, RemoteModel


class Source:
    def chunks(self, file: RemoteFile, start: int) -> Any:
        yield bytes(file.num_bytes - start)


def bring(folder: Path, name: str) -> Held:
    model = RemoteModel(f"x://{name}", name, [RemoteFile("model.safetensors", 1000)], Source())
    return ModelCache(folder).hold(model, name, Asking())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    return tmp_path


def test_a_list(folder: Path, run_command: Callable[..., Any]) -> None:
    bring(folder, "a").release()
    with bring(folder, "b"):
        lines = run_command("cache", "list").stdout.splitlines()
        found = json.loads(run_command("cache", "list", "--json").stdout)
    assert [line.split()[1] for line in lines[1:3]] == ["x://b", "x://a"]
    assert [line.split()[-1] for line in lines[1:3]] == ["yes", "no"]
    assert lines[-1] == f"{folder / 'sources'}: 2 entries, 2.0 KiB"
    assert [(entry["url"], entry["bytes"], entry["in_use"]) for entry in found["entries"]] == [
        ("x://b", 1000, True),
        ("x://a", 1000, False),
    ]


def test_nothing(folder: Path, run_command: Callable[..., Any]) -> None:
    done = run_command("cache", "list")
    assert (done.exit_code, done.stdout) == (0, f"{folder / 'sources'}: 0 entries, 0 B\n")


def test_evicting_by_url_and_by_key(folder: Path, run_command: Callable[..., Any]) -> None:
    bring(folder, "a").release()
    bring(folder, "b").release()
    assert run_command("cache", "evict", "x://a").exit_code == 0
    (entry,) = ModelCache(folder).entries()
    assert "evicted" in run_command("cache", "evict", entry.key[:12]).stdout
    assert ModelCache(folder).entries() == []


def test_what_is_in_use_stays(folder: Path, run_command: Callable[..., Any]) -> None:
    bring(folder, "a").release()
    with bring(folder, "b"):
        done = run_command("cache", "evict", "--all")
    assert done.exit_code == 1
    assert "is in use, and stays" in done.stderr
    assert [entry.url for entry in ModelCache(folder).entries()] == ["x://b"]


@pytest.mark.parametrize("arguments", [[], ["--all", "x"]])
def test_wrong_usage(folder: Path, run_command: Callable[..., Any], arguments: list[str]) -> None:
    assert run_command("cache", "evict", *arguments).exit_code == 2


def test_a_key_that_is_none(folder: Path, run_command: Callable[..., Any]) -> None:
    done = run_command("cache", "evict", "nothing")
    assert done.exit_code == 1
    assert "'nothing' is the key of 0 models" in done.stderr
