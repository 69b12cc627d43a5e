"""How unquantised weights can be quantised while they are read, and what they take then. Imports no torch."""

from typing import Literal, get_args

from loader.layout import Embedding, Linear, Parameter
from loader.quantised.schemes import FORM_BYTES

Rounding = Literal["int8", "int4", "fp8"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
INT4_GROUP = 32


def rounding_of(part: Parameter, rounding: Rounding | None, *, is_tied: bool) -> Rounding | None:
    """What a part is rounded to when `rounding` is asked for; None for what stays as it is.

    Attention's and MLPs' projections become what was asked for. The output layer, and the embedding where it is that
    too (`is_tied`), becomes int8 with a scale a row where the others become integers: it is a large part of what a
    small model reads for a token, and errors there decide what is chosen. Routers of experts stay.
    """
    if rounding is None:
        return None
    if not isinstance(part, Linear):
        is_output = isinstance(part, Embedding) and is_tied
    elif part.scheme is not None:
        return None
    elif part.name.endswith("_proj"):
        return rounding
    else:
        is_output = part.name == "lm_head"
    return "int8" if is_output and rounding != "fp8" else None


def rounded_bytes(shape: tuple[int, int], rounding: Rounding) -> int:
    """Bytes that a rounded weight [rows, columns] takes."""
    rows, columns = shape
    if rounding == "int4":
        return rows * (-(-columns // 2) + 3 * -(-columns // INT4_GROUP)) + FORM_BYTES
    return rows * (columns + 4) + FORM_BYTES


def weight_shape(part: Linear | Embedding) -> tuple[int, int]:
    """Rows and columns of this rank's part of a weight."""
    if isinstance(part, Linear):
        return len(part.outputs), len(part.inputs)
    return len(part.rows), part.columns
