from pathlib import Path

import pytest

from stepwire.cli.config_file import FileValue, read_config_file
from stepwire.cli.errors import SettingsError

KNOWN = {"scheduler": ["port", "max_num_seqs"], "worker": ["port", "device"]}


def write(folder: Path, text: str) -> Path:
    path = folder / "stepwire.toml"
    path.write_text(text)
    return path


def test_the_commands_own_table_wins_and_other_commands_keys_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 'port = 1\ndevice = "cpu"\nmax_num_seqs = 2\n[worker]\nport = 3\n')
    assert read_config_file(path, "scheduler", KNOWN) == {
        "port": FileValue(1, f"port in {path}"),
        "max_num_seqs": FileValue(2, f"max_num_seqs in {path}"),
    }
    assert read_config_file(path, "worker", KNOWN) == {
        "device": FileValue("cpu", f"device in {path}"),
        "port": FileValue(3, f"[worker] port in {path}"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_num_seq = 4", "max_num_seq in {path}: no such setting; did you mean max_num_seqs?"),
        ("zzz = 4", "zzz in {path}: no such setting; known are"),
        ("[workers]\n", "[workers] in {path}: no such setting; did you mean [worker]?"),
        ("[worker]\nmax_num_seqs = 4", "[worker] max_num_seqs in {path}: no such setting; known are device, port"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as raised:
        read_config_file(path, "scheduler", KNOWN)
    assert expected.format(path=path) in raised.value.message


def test_all_unknown_keys_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "prot = 1\nmax_num_sqs = 2\n[worker]\ndevise = 1\n")
    with pytest.raises(SettingsError) as raised:
        read_config_file(path, "scheduler", KNOWN)
    assert len(raised.value.message.splitlines()) == 3


@pytest.mark.parametrize("content", [b"port = ", b"port = 1\nport = 2", b"\xff\xfe"])
def test_a_broken_file_is_named_with_its_fault(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"broken\.toml is not TOML"):
        read_config_file(path, "scheduler", KNOWN)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml: No such file or directory"):
        read_config_file(tmp_path / "none.toml", "scheduler", KNOWN)
