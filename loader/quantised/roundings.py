"""How unquantised weights can be quantised while they are read, and what they take then. Imports no torch."""

from typing import Literal, get_args

from loader.layout import Linear
from loader.quantised.schemes import FORM_BYTES

Rounding = Literal["int8", "int4", "fp8"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
INT4_GROUP = 32


def is_rounded(part: Linear) -> bool:
    """Whether a product is among those that are rounded: the projections of attention and MLPs.

    The output layer and the routers of experts are not: they are small, and errors there decide what is chosen.
    """
    return part.scheme is None and part.name.endswith("_proj")


def rounded_bytes(part: Linear, rounding: Rounding) -> int:
    """Bytes that a rank's share of a rounded weight takes."""
    rows, columns = len(part.outputs), len(part.inputs)
    if rounding == "int4":
        return rows * (-(-columns // 2) + 3 * -(-columns // INT4_GROUP)) + FORM_BYTES
    return rows * (columns + 4) + FORM_BYTES
