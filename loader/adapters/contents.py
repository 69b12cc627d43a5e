"""Taking an adapter's tensors apart: each has its place in the base model, or is refused. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.adapters import names
from loader.adapters.config import LoraConfig
from loader.adapters.targets import EMBEDDING, HEAD, Target, TrainedModule, is_saved_by
from loader.errors import CheckpointError
from loader.layout import Parameter
from loader.tensors import TensorInfo, rows_of

CHECK_BASE = "use the base model that the adapter was trained on"
Stored = dict[tuple[str, str], TensorInfo]
"""Tensors by module and part."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The change of one module: `scaling` times `b` [outputs, rank] times `a` [rank, inputs].

    It is added to the weight [outputs, inputs] of a linear module. The weight of an embedding [rows, columns] takes
    it transposed: rows are the inputs there, and columns the outputs.
    """

    name: str
    rank: int
    scaling: float
    a: TensorInfo
    b: TensorInfo


def take_module(file: Path, target: Target, module: TrainedModule, stored: Stored) -> Iterator[LoraModule]:
    """Takes the two factors of a module out of `stored`; where it joins several of ours, each gets its rows of the
    second, and all of the first.

    Raises CheckpointError for one that is missing or has another shape than rank and base say.
    """
    rows, inputs = module.weight_shape
    outputs, first, second = rows, names.A, names.B
    if module.is_embedding:
        outputs, inputs, first, second = inputs, rows, names.EMBEDDING_A, names.EMBEDDING_B
    a = _take(file, target.name, first, (target.rank, inputs), stored)
    b = _take(file, target.name, second, (outputs, target.rank), stored)
    if module.is_embedding:
        yield LoraModule(target.name, target.rank, target.scaling, a, b)
        return
    for part, info in _split(module, b):
        yield LoraModule(part.name, target.rank, target.scaling, a, info)


def take_full_weights(
    file: Path, config: LoraConfig, modules: Mapping[str, TrainedModule], stored: Stored
) -> dict[str, TensorInfo]:
    """Takes the weights that replace those of the base out of `stored`, by the names of the base's tensors.

    They are what modules_to_save names, and embedding and head, which PEFT adds where it finds them adapted or
    resized. Raises CheckpointError for one that is missing or has another shape, and for a module that is not there.
    """
    taken: dict[str, TensorInfo] = {}
    for name, module in modules.items():
        shape = module.weight_shape
        if any(is_saved_by(entry, name) for entry in config.modules_to_save):
            kinds = {names.WEIGHT: shape, names.BIAS: shape[:1]} if module.has_bias else {names.WEIGHT: shape}
            for kind, expected in kinds.items():
                whole = _take(file, name, kind, expected, stored)
                taken |= {f"{part.name}.{kind}": info for part, info in _split(module, whole)}
        elif name in (EMBEDDING, HEAD):
            for kind in (names.WEIGHT, names.BASE_WEIGHT):
                if (name, kind) in stored:
                    taken[f"{name}.weight"] = _take(file, name, kind, shape, stored)
    for entry in config.modules_to_save:
        if not any(is_saved_by(entry, name) for name in modules):
            raise CheckpointError(
                "invalid",
                f"{config.file}: modules_to_save names {entry!r}, which the base model does not have",
                CHECK_BASE,
                file=config.file,
                expected="modules of the base model",
                found=entry,
            )
    return taken


def refuse_rest(modules: Mapping[str, TrainedModule], stored: Stored) -> None:
    """Raises CheckpointError for a tensor that is left: what an adapter holds and nobody uses is an adapter that does
    something else than it was trained to."""
    for (module, part), info in stored.items():
        if module not in modules:
            raise invalid(info, f"changes {module}, which the base model does not have", CHECK_BASE, "its modules")
        if part in (names.WEIGHT, names.BIAS, names.BASE_WEIGHT):
            what = f"replaces a weight of {module}, which modules_to_save does not name"
        else:
            what = f"changes {module}, which target_modules of the config does not"
        raise invalid(info, what, "restore the config that the adapter was saved with", "no such tensor")


def invalid(info: TensorInfo, what: str, remedy: str, expected: str) -> CheckpointError:
    """The error for a tensor that does not fit."""
    return CheckpointError(
        "invalid",
        f"{info.file}: tensor {info.name!r} {what}, expected {expected}",
        remedy,
        file=info.file,
        tensor=info.name,
        expected=expected,
        found=f"{info.dtype} {list(info.shape)}",
    )


def _split(module: TrainedModule, info: TensorInfo) -> Iterator[tuple[Parameter, TensorInfo]]:
    """Each part of a module with its rows of a tensor that has those of all."""
    start = 0
    for part, num_rows in zip(module.parts, module.num_rows, strict=True):
        yield part, rows_of(info, info.name, start, start + num_rows)
        start += num_rows


def _take(file: Path, module: str, part: str, shape: tuple[int, ...], stored: Stored) -> TensorInfo:
    info = stored.pop((module, part), None)
    if info is None:
        raise CheckpointError(
            "invalid",
            f"{file} has no {part} of {module}, which the adapter's config says it changes",
            "download the whole adapter, with the config that it was saved with",
            file=file,
            tensor=f"{names.PREFIX}{module}.{part}",
            expected=str(list(shape)),
            found="nothing",
        )
    if info.shape != shape:
        raise _wrong_shape(info, module, part, shape)
    return info


def _wrong_shape(info: TensorInfo, module: str, part: str, shape: tuple[int, ...]) -> CheckpointError:
    remedy = CHECK_BASE
    if module in (EMBEDDING, HEAD) and part != names.B:
        remedy = "if the adapter was trained with a resized vocabulary, resize the base model's likewise and save it"
    ranks = {names.A: 0, names.EMBEDDING_A: 0, names.B: 1, names.EMBEDDING_B: 1}
    axis = ranks.get(part)
    if axis is not None and len(info.shape) == 2 and info.shape[1 - axis] == shape[1 - axis]:
        remedy = "restore the config that the adapter was saved with: r or rank_pattern says another rank"
    return invalid(info, f"of the module {module} has the shape {list(info.shape)}", remedy, str(list(shape)))
