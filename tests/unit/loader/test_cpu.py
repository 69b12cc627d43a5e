"""What a machine says of its CPU."""

from pathlib import Path

import pytest

from loader.cpu import cpu_flags


@pytest.mark.parametrize("key", ["flags\t\t", "Features\t"])
def test_the_features_of_the_first_cpu_are_read(tmp_path: Path, key: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\n{key}: fpu avx2\n\nprocessor : 1\n{key}: other\n")
    assert cpu_flags(path) == {"fpu", "avx2"}


def test_a_machine_that_says_nothing_has_none(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "nothing") == frozenset()
    (tmp_path / "empty").write_text("processor : 0\n")
    assert cpu_flags(tmp_path / "empty") == frozenset()
