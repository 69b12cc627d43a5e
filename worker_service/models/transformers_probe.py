"""Whether a definition of transformers can be served: that its layers reach our attention, and what they ask of it."""

from collections.abc import Mapping, Sequence

import torch

from worker_service.models.attention_hook import ForwardPass, LayerCall, MaskDescription, seen_window
from worker_service.models.scores import Scores

# Lengths of the two sequences of the probe, and how much of them its first step computes.
LENGTHS, FIRST = (6, 4), (5, 1)
# Largest error against transformers' own attention, of the logits' norm. What is ignored or mistaken shows as an error
# of about 1; in half precision a mixture of experts may choose another for one token.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}


class PlainAttention:
    """Attention over sequences that are remembered whole, for the few tokens of a probe; see models.decoder.Attention.

    `counts` tells how many tokens of each sequence the next pass has.
    """

    def __init__(self, scores: Sequence[Scores] = (), windows: Sequence[int | None] = ()) -> None:
        self.counts: Sequence[int] = ()
        self._scores = scores
        self._windows = windows
        self._keys: dict[tuple[int, int], torch.Tensor] = {}
        self._values: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attends, and remembers keys and values."""
        parts = zip(*(torch.split(tensor, list(self.counts)) for tensor in (query, key, value)), strict=True)
        made = [self._attend(layer, number, *part) for number, part in enumerate(parts)]
        return torch.cat(made)

    def _attend(
        self, layer: int, number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        place = (layer, number)
        self._keys[place] = keys = _joined(self._keys.get(place), key)
        self._values[place] = values = _joined(self._values.get(place), value)
        how = self._scores[layer] if self._scores else Scores(query.shape[-1] ** -0.5)
        window = self._windows[layer] if self._windows else None
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        distance = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | (distance >= (window or len(keys)))
        weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.float()).flatten(1).to(query.dtype)


def _joined(before: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor:
    return after if before is None else torch.cat((before, after))


def probe_tokens(vocab_size: int) -> list[list[int]]:
    """The sequences of the probe."""
    return [[(7919 * (number + 3 * place) + 5) % vocab_size for place in range(n)] for number, n in enumerate(LENGTHS)]


def check_calls(calls: Sequence[LayerCall], num_layers: int) -> LayerCall:
    """Holds the calls of one pass against each other, and answers the first of them.

    Raises ValueError, saying what is wrong, unless each layer reached attention once, with heads as all others have.
    """
    if len(calls) != num_layers:
        raise ValueError(f"{len(calls)} of its {num_layers} layers reach the attention that it is given")
    first = calls[0]
    for call in calls:
        if call.others:
            raise ValueError(f"it gives attention {call.others[0]}, which ours does not take")
        if (call.query_shape, call.key_shape) != (first.query_shape, first.key_shape):
            raise ValueError("its layers have heads of different numbers or sizes")
        if call.value_shape != call.key_shape or call.query_shape[-1] != call.key_shape[-1]:
            raise ValueError("its keys, queries and values have different sizes")
    return first


def layer_windows(calls: Sequence[LayerCall], num_positions: int) -> list[int | None]:
    """How far back each layer sees, by its mask. Raises ValueError for a mask of another kind."""
    known: Mapping[int, int | None] = {}
    windows = []
    for call in calls:
        if call.mask is None:
            window = call.window
        elif isinstance(call.mask, MaskDescription):
            key = id(call.mask.mask_function)
            known = {**known, key: known[key] if key in known else seen_window(call.mask.mask_function, num_positions)}
            window = known[key]
        else:
            raise ValueError("it makes masks of its own")
        if call.window is not None and window != call.window and call.window < num_positions:
            raise ValueError(f"it asks for a window of {call.window} and masks one of {window}")
        windows.append(window)
    return windows


def check_error(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ValueError where logits are too far from what transformers' own attention gives."""
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    if not error <= TOLERANCES[got.dtype]:
        text = "two sequences at once give other logits than transformers' own attention gives each"
        raise ValueError(f"{text} (a relative error of {error:.3g})")


def recorded(attention: PlainAttention) -> ForwardPass:
    """A pass that keeps what its layers ask for."""
    return ForwardPass(attention, records=True)
