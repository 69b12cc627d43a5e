import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.formats.registry import ENTRY_POINT_GROUP, find_format
from tests.support.tiny_checkpoint import make_tiny_llama

GOOD = """
from dataclasses import replace
from loader.checkpoint import open_checkpoint

class Format:
    name = "boxed"
    def recognises(self, path):
        return (path / "box.txt").exists()
    def open(self, path):
        return replace(open_checkpoint(path / "inside"), format=self.name, path=path)
"""
BROKEN = {
    "cannot_import": "import a_module_that_does_not_exist",
    "cannot_make": "class Format:\n    def __init__(self, needed): pass",
    "cannot_ask": "class Format:\n    name = 'x'\n    def recognises(self, path): raise RuntimeError('a defect')",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages; `install` puts one there."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("fake_format_"):
            del sys.modules[name]


def install(folder: Path, name: str, source: str) -> None:
    module = f"fake_format_{name}"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {module}:Format\n")
    importlib.invalidate_caches()


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A checkpoint in a layout of which we know nothing."""
    make_tiny_llama(tmp_path / "box" / "inside")
    (tmp_path / "box" / "box.txt").touch()
    return tmp_path / "box"


def test_a_format_of_another_package(installed: Path, box: Path) -> None:
    install(installed, "boxed", GOOD)
    checkpoint = open_checkpoint(box)
    assert (checkpoint.format, checkpoint.path) == ("boxed", box)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_keeps_no_other_from_working(installed: Path, box: Path, kind: str) -> None:
    install(installed, "a_broken_one", BROKEN[kind])
    install(installed, "boxed", GOOD)
    assert open_checkpoint(box).format == "boxed"
    assert open_checkpoint(box / "inside").format == "safetensors"


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_is_named_where_no_format_fits(installed: Path, box: Path, kind: str) -> None:
    install(installed, "a_broken_one", BROKEN[kind])
    with pytest.raises(CheckpointError, match="'a_broken_one' of fake_format_a_broken_one could not be used"):
        open_checkpoint(box)


def test_what_we_recognise_imports_no_other_package(installed: Path, box: Path) -> None:
    install(installed, "boxed", GOOD)
    open_checkpoint(box / "inside")
    assert "fake_format_boxed" not in sys.modules


@pytest.mark.parametrize("body", ["raise RuntimeError('a defect')", "return 5"])
def test_one_that_fails_while_it_opens(installed: Path, box: Path, body: str) -> None:
    install(
        installed,
        "faulty",
        f"class Format:\n    name = 'f'\n    def recognises(self, path): return True\n    def open(self, path): {body}",
    )
    with pytest.raises(CheckpointError, match="fake_format_faulty") as caught:
        open_checkpoint(box)
    assert (caught.value.code, caught.value.file) == ("unsupported", box)


def test_an_error_that_names_its_cause_passes_as_it_is(installed: Path, box: Path) -> None:
    error = "from loader.errors import CheckpointError\n        raise CheckpointError('invalid', 'torn', 'mend it')"
    install(
        installed,
        "strict",
        f"class Format:\n    name = 'f'\n    def recognises(self, path): return True\n"
        f"    def open(self, path):\n        {error}",
    )
    with pytest.raises(CheckpointError, match=r"^torn; mend it$"):
        open_checkpoint(box)


def test_names_of_ours(tmp_path: Path) -> None:
    found, broken = find_format(make_tiny_llama(tmp_path))
    assert found is not None
    assert (found.name, broken) == ("safetensors", [])
