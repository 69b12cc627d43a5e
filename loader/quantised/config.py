"""How the weights of a model are quantised. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from loader.quantised.schemes import Scheme


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the weights of a model are quantised.

    `method` is as the config names it. `schemes` has each quantised product by its name ("model.layers.0.mlp.up_proj");
    all others are stored as they are. Products in `biased` have a bias that their family knows nothing of: old writers
    of GPTQ stored one beside every weight.
    """

    method: str
    schemes: Mapping[str, Scheme]
    biased: frozenset[str] = frozenset()
