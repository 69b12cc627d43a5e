"""Where tensors lie, and which part of one a rank wants. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor, under its Hugging Face name.

    `dtype` is the storage type as its format spells it ("BF16", "F32", "Q4_1"); `shape` is in the Hugging Face
    order (rows first); `offset` counts from the start of the file. `rotary_heads` is set where rows of a rotary
    projection are stored pairwise (llama GGUF): the number of heads to undo it by.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    stored_name: str
    rotary_heads: int | None = None
    pieces: "tuple[Piece, ...]" = ()
    """Where the tensor is stored in several places: all of them, in order; `offset` means nothing then."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part `[start, stop)` along `dim` of a whole tensor, stored as a tensor of its own."""

    dim: int
    start: int
    stop: int
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """The part `[start, stop)` along `dim` of the tensor `name`; all of it when `dim` is None.

    `shape` is the shape of the whole tensor, which the checkpoint must agree with. `as_stored` asks for the values in
    the type they are stored in (the words and scales of quantised weights) and not in the model's; then `dtypes` are
    the storage types they may have.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    as_stored: bool = False
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        if self.dim not in range(len(self.shape)) or not 0 <= self.start <= self.stop <= self.shape[self.dim]:
            raise ValueError(f"slice {self.start}:{self.stop} along {self.dim} is outside {self.name} {self.shape}")

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


def rows_of(stored: TensorInfo, name: str, start: int, stop: int) -> TensorInfo:
    """The rows `[start, stop)` of a stored tensor, as a tensor of its own called `name`."""
    row_bytes = stored.num_bytes // stored.shape[0]
    return replace(
        stored,
        name=name,
        shape=(stop - start, *stored.shape[1:]),
        offset=stored.offset + start * row_bytes,
        num_bytes=(stop - start) * row_bytes,
    )


def files_of(tensors: Iterable[TensorInfo]) -> list[Path]:
    """All files that hold some of the tensors, in order."""
    stored = (part for tensor in tensors for part in ([piece.info for piece in tensor.pieces] or [tensor]))
    return sorted({part.file for part in stored})
