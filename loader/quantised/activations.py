"""How the input of a product is rounded before it, as checkpoints state it. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

ActivationKind = Literal["int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Activation:
    """The input of a product is rounded to int8 or to float8 e4m3, symmetrically.

    Its scale is one stored number where it is static, else the largest magnitude of each token over the largest value
    of the type, taken over all inputs or over each `group_size` of them.
    """

    kind: ActivationKind
    is_static: bool = False
    group_size: int | None = None
