"""Values that the configs of several methods state alike. Imports no torch."""

from collections.abc import Sequence

from loader.errors import CheckpointError
from loader.fields import Fields
from loader.patterns import full_matches

MAX_GROUP = 1 << 20
MAX_PATTERNS = 1024


def group_size(fields: Fields, name: str) -> int:
    """The field's size of a group; 0 where the config says -1, for one group of all."""
    size = fields.integer(name, (-1, MAX_GROUP), 128)
    if size == 0:
        raise fields.error(name, "is 0", f"-1, or 1 to {MAX_GROUP}", "0")
    return max(size, 0)


def block_shape(fields: Fields, name: str, value: object) -> tuple[int, int]:
    """Rows and columns of a block."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 1 <= size <= MAX_GROUP for size in value)
    ):
        raise fields.error(name, f"is {value!r}", f"two sizes from 1 to {MAX_GROUP}", repr(value)[:200])
    return value[0], value[1]


def texts(fields: Fields, name: str) -> list[str]:
    """A list of texts; a null counts as none."""
    value = fields.values.get(name) or []
    if not isinstance(value, list) or len(value) > 1 << 16 or not all(isinstance(item, str) for item in value):
        raise fields.error(name, "is no list of texts", "texts", repr(value)[:200])
    return value


def match_starts(fields: Fields, expressions: Sequence[str], names: Sequence[str]) -> list[frozenset[str]]:
    """For each expression the names whose beginning it matches, in the sense of `re.match`."""
    return full_matches(fields.file, [f"(?:{expression})(?s:.*)" for expression in expressions], names)


def unsupported(fields: Fields, what: str, remedy: str, expected: str, found: str) -> CheckpointError:
    """The error for something sound that we do not have."""
    return CheckpointError(
        "unsupported",
        f"{fields.file}: {what} are not supported",
        remedy,
        file=fields.file,
        expected=expected,
        found=found[:100],
    )
