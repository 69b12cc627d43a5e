"""How attention makes scores, which differs from model to model and may from layer to layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scores:
    """Products of query and key times `scale`; then, with a softcap c, c * tanh(score / c)."""

    scale: float
    softcap: float | None = None
