"""Reading a rank's weights where some are quantised, or are to be: each is packed as soon as it is read."""

from collections.abc import Callable

import torch
from torch import Tensor

from loader.checkpoint import Checkpoint
from loader.layout import Embedding, Linear, parameters
from loader.quantised.pack import StoredWeight, pack
from loader.quantised.packed import flatten
from loader.quantised.rounding import rounded_weight
from loader.quantised.roundings import Rounding, rounding_of
from loader.quantised.settle import check_rounding
from loader.reading.report import LoadReport
from loader.shares import RankPlace
from loader.weights import load_weights


def load_rank(
    checkpoint: Checkpoint,
    place: RankPlace,
    *,
    dtype: torch.dtype,
    rounding: Rounding | None = None,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
    report: LoadReport | None = None,
) -> dict[str, Tensor]:
    """All that the rank at `place` holds, in CPU tensors by name: unquantised ones in `dtype`, as "{name}.weight" and
    "{name}.bias"; quantised weights as `loader.quantised.packed.flatten` names their tensors.

    `rounding` quantises what the checkpoint does not. The other arguments are as for `load_weights`. Beside the result
    and the reader's buffers it holds what is stored of quantised weights of which parts are yet to come, and one
    unquantised weight that is rounded. Raises what `load_weights` and `pack` raise, and CheckpointError "unsupported"
    for a rounding of what is quantised already.
    """
    check_rounding(checkpoint, rounding)
    held = list(parameters(checkpoint.config, place))
    wanted = [want for parameter in held for want in parameter.slices()]
    collector = _Collector(checkpoint, rounding)
    for parameter in held:
        if isinstance(parameter, Linear | Embedding):
            collector.expect(parameter)
    load_weights(
        checkpoint,
        wanted,
        dtype=dtype,
        progress=progress,
        cancelled=cancelled,
        deliver=collector.take,
        report=report,
    )
    return collector.result


class _Collector:
    """Packs each weight when all that is stored of it has come."""

    def __init__(self, checkpoint: Checkpoint, rounding: Rounding | None) -> None:
        self.result: dict[str, Tensor] = {}
        self._checkpoint = checkpoint
        self._rounding = rounding
        self._owners: dict[str, Linear | Embedding] = {}
        self._stored: dict[str, dict[str, Tensor]] = {}
        self._missing: dict[str, int] = {}

    def expect(self, part: Linear | Embedding) -> None:
        """Announces a product, whose weight may be quantised, or an embedding, which may be a product too."""
        if part.scheme is not None:
            names = [want.name for want in part.scheme.parts(part.name, part.outputs, part.inputs)]
        elif self._rounding_of(part) is not None:
            names = [f"{part.name}.weight"]
        else:
            return
        self._owners.update(dict.fromkeys(names, part))
        self._stored[part.name], self._missing[part.name] = {}, len(names)

    def _rounding_of(self, part: Linear | Embedding) -> Rounding | None:
        return rounding_of(part, self._rounding, is_tied=self._checkpoint.config.tie_word_embeddings)

    def take(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor that was read."""
        part = self._owners.pop(name, None)
        if part is None:
            self.result[name] = tensor
            return
        self._stored[part.name][name.removeprefix(f"{part.name}.")] = tensor
        self._missing[part.name] -= 1
        if self._missing[part.name] == 0:
            self._pack(part, self._stored.pop(part.name))

    def _pack(self, part: Linear | Embedding, stored: dict[str, Tensor]) -> None:
        if part.scheme is not None:
            file = self._checkpoint.tensors[f"{part.name}.{next(iter(stored))}"].file
            packed = pack(StoredWeight(part.name, part.outputs, part.inputs, stored, file), part.scheme)
        else:
            rounding = self._rounding_of(part)
            assert rounding is not None
            packed = rounded_weight(stored["weight"], rounding)
        self.result.update(flatten(part.name, packed))
