"""Typed, bounded reading of the values that a checkpoint states of itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fields:
    """Values of one file by name. A null counts as absent; anything of a wrong type or out of bounds is refused.

    Every reader raises CheckpointError "invalid" that names file, field, what was expected and what was found.
    """

    file: Path
    values: Mapping[str, object]
    remedy: str = "restore the value the model was published with"

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, bounds: tuple[int, int], default: int | None = None) -> int:
        """A whole number within `bounds`, both included; without `default` the field must be there."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing", f"{bounds[0]} to {bounds[1]}", "nothing")
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not bounds[0] <= value <= bounds[1]:
            raise self.error(name, f"is {value!r}", f"a whole number from {bounds[0]} to {bounds[1]}", repr(value))
        return value

    def number(self, name: str, bounds: tuple[float, float], default: float | None = None) -> float:
        """A finite number within `bounds`, both included; without `default` the field must be there."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing", f"{bounds[0]:g} to {bounds[1]:g}", "nothing")
            value = default
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not bounds[0] <= number <= bounds[1]:  # NaN is within no bounds
            raise self.error(name, f"is {value!r}", f"a number from {bounds[0]:g} to {bounds[1]:g}", repr(value))
        return float(number)

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}", "true or false", repr(value))
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, f"is {value!r}", "a text", repr(value))
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; negative ids, an old way to say "none", are left out."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids: list[int] = []
        for token in value if isinstance(value, list | tuple) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token >= vocab_size:
                raise self.error(name, f"is {value!r}", f"token ids below {vocab_size}", repr(token))
            if token >= 0 and token not in ids:
                ids.append(token)
        return tuple(ids)

    def error(self, name: str, what: str, expected: str, found: str) -> CheckpointError:
        """An error about the field `name`."""
        return CheckpointError(
            "invalid",
            f"{self.file}: {name} {what[:200]}, expected {expected}",
            self.remedy,
            file=self.file,
            expected=expected,
            found=found[:200],
        )


VOCAB_BOUNDS = (1, 1 << 24)
HIDDEN_BOUNDS = (1, 1 << 20)
INTERMEDIATE_BOUNDS = (1, 1 << 22)
LAYER_BOUNDS = (1, 4096)
HEAD_BOUNDS = (1, 1 << 14)
HEAD_DIM_BOUNDS = (2, 4096)
POSITION_BOUNDS = (1, 100_000_000)
EPSILON_BOUNDS = (1e-20, 1.0)
THETA_BOUNDS = (1.0, 1e15)
