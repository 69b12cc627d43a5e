"""Models as lines of text."""

import pytest

from stepwire.cli.model_entries import entry_text, parse_entries


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("model=/m/a,tp=2", [{"model": "/m/a", "tp": "2"}]),
        (" model=/m/a , tp=2 ,", [{"model": "/m/a", "tp": "2"}]),
        ("model=/m/a\n\nmodel=/m/b\n", [{"model": "/m/a"}, {"model": "/m/b"}]),
        ('"model=/m/a, b",served_model_name=x=y', [{"model": "/m/a, b", "served_model_name": "x=y"}]),
        ("workers=h:1,workers=h:2,workers=h:3", [{"workers": ["h:1", "h:2", "h:3"]}]),
        ("", []),
    ],
)
def test_a_line_is_a_model(text: str, entries: list[object]) -> None:
    assert parse_entries(text) == entries


@pytest.mark.parametrize("text", ["model", "model=/a,tp", '"model=/a'])
def test_what_is_no_entry_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not KEY=VALUE"):
        parse_entries(text)


@pytest.mark.parametrize(
    "entry", [{"model": "/m/a"}, {"model": '/m/a,"b"', "workers": ["h:1", "h:2"], "tp": "2"}, {"model": "a\nb"}]
)
def test_what_is_written_is_read_back(entry: dict[str, object]) -> None:
    assert parse_entries(entry_text(entry)) == [entry]
