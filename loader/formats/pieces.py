"""Joining what ranks hold of a tensor to the whole tensor. Imports no torch."""

from collections.abc import Sequence

from loader.errors import CheckpointError
from loader.tensors import Piece, TensorInfo


def join_pieces(name: str, pieces: Sequence[Piece], size: int) -> TensorInfo:
    """The tensor whose parts along one dimension, which is `size` long, are `pieces`; one or more, in any order.

    Of equal parts, which ranks hold as copies, the first counts. Raises CheckpointError "invalid" where parts leave
    something out, overlap, or differ in type or in another dimension.
    """
    _check_alike(name, pieces)
    distinct: dict[tuple[int, int], Piece] = {}
    for piece in pieces:
        distinct.setdefault((piece.start, piece.stop), piece)
    ordered = [distinct[key] for key in sorted(distinct)]
    position = 0
    for piece in ordered:
        if piece.start != position:
            what = "overlaps the one before" if piece.start < position else f"leaves out {position} to {piece.start}"
            raise _misfit(name, piece, f"the part {piece.start} to {piece.stop} {what}", f"a part from {position} on")
        position = piece.stop
    if position != size:
        raise _misfit(name, ordered[-1], f"the parts end at {position} of {size}", f"parts up to {size}")
    if len(ordered) == 1:
        return ordered[0].info
    dim, first = ordered[0].dim, ordered[0].info
    return TensorInfo(
        name=name,
        dtype=first.dtype,
        shape=(*first.shape[:dim], size, *first.shape[dim + 1 :]),
        file=first.file,
        offset=first.offset,
        num_bytes=sum(piece.info.num_bytes for piece in ordered),
        stored_name=first.stored_name,
        pieces=tuple(ordered),
    )


def _check_alike(name: str, pieces: Sequence[Piece]) -> None:
    first = pieces[0]
    for piece in pieces:
        shape = piece.info.shape
        others = shape[: piece.dim] + shape[piece.dim + 1 :]
        wanted = first.info.shape[: first.dim] + first.info.shape[first.dim + 1 :]
        if piece.dim != first.dim or others != wanted or piece.info.dtype != first.info.dtype:
            found = f"{piece.info.dtype} {list(shape)}"
            like = f"{first.info.dtype} {list(first.info.shape)} of {first.info.file.name}"
            raise _misfit(name, piece, f"the part {found} does not go with {like}", f"a part like {like}")
        if shape[piece.dim] != piece.stop - piece.start:
            raise _misfit(name, piece, f"the part is {list(shape)}", f"{piece.stop - piece.start} along {piece.dim}")


def _misfit(name: str, piece: Piece, what: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "invalid",
        f"{piece.info.file}: tensor {name!r}: {what}",
        "make the checkpoint again: its files do not fit together",
        file=piece.info.file,
        tensor=name,
        expected=expected,
        found=f"{list(piece.info.shape)} from {piece.start} on",
    )
