from pathlib import Path

import pytest

from loader.errors import CheckpointError
from loader.fields import Fields

FILE = Path("config.json")


def fields(value: object) -> Fields:
    return Fields(FILE, {"x": value})


@pytest.mark.parametrize(("value", "expected"), [(1, 1), (5, 5), (3.0, 3), (None, 4)])
def test_integer(value: object, expected: int) -> None:
    assert fields(value).integer("x", (1, 5), 4) == expected


@pytest.mark.parametrize("value", [0, 6, 2.5, "3", True, [3], float("inf"), float("nan")])
def test_integer_refused(value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        fields(value).integer("x", (1, 5), 4)
    assert (caught.value.file, caught.value.found) == (FILE, repr(value))


@pytest.mark.parametrize(("value", "expected"), [(0.5, 0.5), (1, 1.0), (None, 0.25)])
def test_number(value: object, expected: float) -> None:
    assert fields(value).number("x", (0.0, 1.0), 0.25) == expected


@pytest.mark.parametrize(
    "value", [-0.1, 1.1, "0.5", False, float("nan"), float("inf"), pytest.param(10**400, id="huge")]
)
def test_number_refused(value: object) -> None:
    with pytest.raises(CheckpointError):
        fields(value).number("x", (0.0, 1.0), 0.25)


def test_missing_without_default() -> None:
    for read in (lambda: fields(None).integer("x", (1, 2)), lambda: Fields(FILE, {}).number("x", (1.0, 2.0))):
        with pytest.raises(CheckpointError, match="missing"):
            read()


@pytest.mark.parametrize("value", [0, "true", None])
def test_boolean(value: object) -> None:
    if value is None:
        assert fields(value).boolean("x", default=True) is True
        return
    with pytest.raises(CheckpointError, match="true or false"):
        fields(value).boolean("x", default=True)


def test_text() -> None:
    assert fields("a").text("x") == "a"
    assert fields(None).text("x", "b") == "b"
    with pytest.raises(CheckpointError, match="a text"):
        fields(5).text("x")


@pytest.mark.parametrize(("value", "expected"), [(3, (3,)), ([3, 1, 3], (3, 1)), (None, ()), (-1, ()), ([-1, 2], (2,))])
def test_token_ids(value: object, expected: tuple[int, ...]) -> None:
    assert fields(value).token_ids("x", 10) == expected


@pytest.mark.parametrize("value", [10, [1, 10], "1", [None], True, 1.0])
def test_token_ids_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="below 10"):
        fields(value).token_ids("x", 10)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        fields("y" * 10_000).integer("x", (1, 2))
    assert len(str(caught.value)) < 600
