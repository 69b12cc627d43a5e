import os
from pathlib import Path

import pytest

from loader.errors import LoadCancelled
from loader.sources.verified import VerifiedFiles

SUM, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"123")
    return path


def test_a_file_that_was_found_sound_is_no_longer_missing(tmp_path: Path, file: Path) -> None:
    wanted = [(file, SUM)]
    assert VerifiedFiles(tmp_path, file.parent).missing(wanted) == wanted
    VerifiedFiles(tmp_path, file.parent).add(file, file.stat(), SUM)
    assert VerifiedFiles(tmp_path, file.parent).missing(wanted) == []
    assert VerifiedFiles(tmp_path, file.parent).missing([(file, OTHER)]) == [(file, OTHER)]
    assert VerifiedFiles(tmp_path, tmp_path).missing(wanted) == wanted  # another checkpoint


def test_the_way_to_a_file_does_not_matter(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    VerifiedFiles(tmp_path, link).add(link / file.name, file.stat(), SUM)
    assert VerifiedFiles(tmp_path, file.parent).missing([(file, SUM)]) == []


def test_a_file_that_changed_while_it_was_read_is_not_remembered(tmp_path: Path, file: Path) -> None:
    before = file.stat()
    os.utime(file, (1, 1))
    VerifiedFiles(tmp_path, file.parent).add(file, before, SUM)
    assert VerifiedFiles(tmp_path, file.parent).missing([(file, SUM)]) == [(file, SUM)]


def test_a_file_that_is_gone_is_missing(tmp_path: Path, file: Path) -> None:
    VerifiedFiles(tmp_path, file.parent).add(file, file.stat(), SUM)
    file.unlink()
    assert VerifiedFiles(tmp_path, file.parent).missing([(file, SUM)]) == [(file, SUM)]


def test_one_process_works_at_a_time_and_others_can_give_up(tmp_path: Path, file: Path) -> None:
    first = VerifiedFiles(tmp_path, file.parent)
    with first.alone(lambda: False), pytest.raises(LoadCancelled), first.alone(lambda: True):
        pass
    with first.alone(lambda: True):
        pass
