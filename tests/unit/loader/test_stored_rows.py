from pathlib import Path

import pytest

from loader.errors import CheckpointError
from loader.files import open_regular
from loader.stored_rows import read_rows
from loader.tensors import TensorInfo


def test_rows_are_read_from_where_they_lie_or_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(20)))
    info = TensorInfo("w", "F32", (4, 1), file, 4, 16, "w")
    with open_regular(file) as (descriptor, _):
        assert read_rows(descriptor, info, 1, 3) == bytes(range(8, 16))
        assert read_rows(descriptor, info, 2, 2) == b""
        file.write_bytes(bytes(15))
        with pytest.raises(CheckpointError, match="became shorter while it was read") as caught:
            read_rows(descriptor, info, 2, 4)
    assert (caught.value.file, caught.value.tensor) == (file, "w")
