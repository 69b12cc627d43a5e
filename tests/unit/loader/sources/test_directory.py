from pathlib import Path

import pytest

from loader.sources.directory import default_directory


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("STEPWIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "stepwire"
