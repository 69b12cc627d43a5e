"""Our attention in the place of that of transformers' definitions, through its AttentionInterface.

A step's packed batch goes through a definition as one row; what reaches attention is taken out of that row and given
to the attention of the step, layer by layer. See `worker_service.models.decoder.Attention`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from worker_service.models.decoder import Attention
from worker_service.models.scores import Scores

SERVING, PROBING = "stepwire", "stepwire-probing"
"""Names of our attention. Under the second, definitions also make masks, which say what each layer may see."""

# What definitions pass along that attention has no use for.
_KNOWN = ("position_ids", "cache_position")
MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asked of attention. `mask` is what `describe_mask` made of its mask, None where it had none;
    `others` names tensors that it gave and that we know nothing of."""

    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    scores: Scores
    window: int | None
    mask: object
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class ForwardPass:
    """One pass through a definition: the attention that its layers reach, and what they asked of it."""

    attention: Attention
    calls: list[LayerCall] = field(default_factory=list)
    num_calls: int = 0
    records: bool = False


_CURRENT: ContextVar[ForwardPass] = ContextVar("stepwire_forward_pass")


def register_attention() -> None:
    """Makes our attention known to transformers, under both names."""
    for name in (SERVING, PROBING):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(PROBING, describe_mask)


def run(forward_pass: ForwardPass, call: Callable[[], object]) -> object:
    """Answers what `call` does while its layers reach the attention of `forward_pass`."""
    token = _CURRENT.set(forward_pass)
    try:
        return call()
    finally:
        _CURRENT.reset(token)


def _attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """See AttentionInterface: query [1, heads, num_tokens, head_dim], key and value alike -> [1, num_tokens, heads,
    head_dim]."""
    current = _CURRENT.get()
    layer = current.num_calls
    current.num_calls += 1
    if current.records:
        scaling = asked.get("scaling")
        scores = Scores(query.shape[-1] ** -0.5 if scaling is None else float(scaling), asked.get("softcap"))
        shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
        others = tuple(name for name, given in asked.items() if isinstance(given, torch.Tensor) and name not in _KNOWN)
        current.calls.append(LayerCall(*shapes, scores, asked.get("sliding_window"), attention_mask, others))
    packed = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    output = current.attention(layer, *packed)
    return output.view(1, output.shape[0], query.shape[1], -1), None


def describe_mask(mask_function: MaskFunction, **_others: object) -> "MaskDescription":
    """Stands for a mask: the function that tells which key each query sees. See AttentionMaskInterface."""
    return MaskDescription(mask_function)


class MaskDescription(torch.Tensor):
    """A tensor of one element, for definitions that look at their masks' shape, with the function it stands for."""

    mask_function: MaskFunction

    @staticmethod
    def __new__(cls, mask_function: MaskFunction) -> "MaskDescription":
        made: MaskDescription = torch.Tensor._make_subclass(cls, torch.zeros(1, 1, 1, 1))
        made.mask_function = mask_function
        return made

    def __getitem__(self, _place: object) -> "MaskDescription":
        return self  # definitions cut masks to the length of the keys


def seen_window(mask_function: MaskFunction, num_positions: int) -> int | None:
    """How many positions, its own among them, a mask lets every token see; None for all that come before it.

    Raises ValueError for a mask that is neither.
    """
    last = num_positions - 1
    num_seen = int(_row(mask_function, last, num_positions).sum())
    window = None if num_seen == num_positions else num_seen
    edges = () if window is None else (window - 1, window, window + 1, 2 * window)
    for query in sorted({0, 1, 2, 7, last // 2, last, *edges}):
        if query < num_positions:
            keys = torch.arange(num_positions)
            expected = (keys <= query) & (keys > query - (window or num_positions))
            if not torch.equal(_row(mask_function, query, num_positions), expected):
                raise ValueError(f"its mask shows token {query} other tokens than the last before it")
    return window


def _row(mask_function: MaskFunction, query: int, num_positions: int) -> torch.Tensor:
    seen = mask_function(0, 0, torch.tensor(query), torch.arange(num_positions))
    return seen.broadcast_to(num_positions).bool()
