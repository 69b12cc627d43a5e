from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.store.folder import StoreFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    """An empty store."""
    with StoreFolder(tmp_path / "store", create=True) as folder:
        yield folder
