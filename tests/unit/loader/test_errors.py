from pathlib import Path

import pytest

from loader.errors import CheckpointError


def test_text_that_is_no_unicode_can_be_sent() -> None:
    error = CheckpointError("invalid", "caf\u00e9 \ud800", "\udcff", Path("\udcff"), "\ud800", "x", "\udfff")
    assert str(error) == "caf\u00e9 \\ud800; \\udcff"
    assert (error.tensor, error.expected, error.found) == ("\\ud800", "x", "\\udfff")


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600"])
def test_long_texts_lose_their_middle(letter: str) -> None:
    text = "begin" + letter * 100_000 + "end"
    error = CheckpointError("invalid", text, text, tensor=text, found=text)
    for shown, most in ((error.message, 2000), (error.remedy, 2000), (error.tensor, 300), (error.found, 300)):
        assert shown is not None
        assert most // 2 < len(shown.encode()) <= most
        assert shown.startswith("begin" + letter)
        assert shown.endswith(letter + "end")
        assert " ... " in shown


def test_what_is_absent_stays_absent() -> None:
    error = CheckpointError("invalid", "a", "b")
    assert (error.file, error.tensor, error.expected, error.found) == (None,) * 4
