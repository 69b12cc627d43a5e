"""Adding an adapter to the weights of its base: a model that is served as if it were a checkpoint of its own."""

from collections.abc import MutableMapping

import torch
from torch import Tensor

from loader.adapters.config import unsupported
from loader.adapters.load import LoadedAdapter, LoraFactors
from loader.adapters.targets import EMBEDDING, HEAD
from loader.errors import CheckpointError

# As many float32 values of a weight are held beside it.
_CHUNK_VALUES = 1 << 22


def merge_adapter(weights: MutableMapping[str, Tensor], loaded: LoadedAdapter) -> None:
    """Changes a rank's `weights`, by the base's names, into those of base and adapter: W + scaling * B @ A.

    Sums are made in float32 and rounded to the weight's type once. `weights` are those of the same rank, not
    quantised; those that the adapter replaces are exchanged, in the type they had. Raises CheckpointError
    "unsupported" for factors of an embedding or a head that are one weight, and for a sum that float16 cannot hold;
    ValueError for a weight that is missing or has another shape. Then some weights may have been changed.
    """
    adapter = loaded.adapter
    for name in (EMBEDDING, HEAD):
        if name in adapter.modules and adapter.base.tie_word_embeddings:
            what = f"changes {name} of a base model whose embedding is also its head: merging that"
            raise unsupported(adapter.config.file, what, "apply the adapter at run time instead", name)
    quantisation = adapter.base.quantisation
    changed = (*adapter.modules, *(name.rpartition(".")[0] for name in adapter.full_weights))
    quantised = [name for name in changed if quantisation is not None and name in quantisation.schemes]
    if quantised:
        what = f"changes {quantised[0]}, whose weight is quantised: merging that"
        raise unsupported(adapter.config.file, what, "apply the adapter at run time instead", quantised[0])
    for name, tensor in loaded.full_weights.items():
        old = _weight(weights, name, tuple(tensor.shape))
        weights[name] = _checked(tensor.to(old.dtype), name, loaded)
    for module, factors in loaded.factors.items():
        name = f"{module}.weight"
        shape = (factors.b.shape[0], factors.a.shape[1])
        weight = _weight(weights, name, shape[::-1] if factors.is_embedding else shape)
        _add(weight, factors)
        _checked(weight, name, loaded)


def _add(weight: Tensor, factors: LoraFactors) -> None:
    a, b = factors.a.float(), factors.b.float()
    left, right = (a.T, b.T) if factors.is_embedding else (b, a)
    step = max(1, _CHUNK_VALUES // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        rows.copy_(torch.addmm(rows.float(), left[start : start + step], right, alpha=factors.scaling))


def _weight(weights: MutableMapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    weight = weights.get(name)
    if weight is None or tuple(weight.shape) != shape:
        found = "nothing" if weight is None else str(list(weight.shape))
        raise ValueError(f"{name} must be a weight of the shape {list(shape)}, and is {found}")
    return weight


def _checked(weight: Tensor, name: str, loaded: LoadedAdapter) -> Tensor:
    if weight.dtype == torch.float16 and not bool(torch.isfinite(weight).all()):
        file = loaded.adapter.weights_file
        raise CheckpointError(
            "unsupported",
            f"{file}: with the adapter {name} has values that float16 cannot hold",
            "load the model as bfloat16 or float32",
            file=file,
            tensor=name,
            expected="at most 65504",
        )
    return weight
