"""A tied model that carries an output layer all the same: it must repeat the embedding, for it is never used."""

from collections.abc import Callable, Sequence

import torch

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.files import open_regular
from loader.stored_rows import FLOAT_DTYPES, read_rows
from loader.tensors import TensorInfo, WeightSlice

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 4 << 20


def check_tied_head(checkpoint: Checkpoint, wanted: Sequence[WeightSlice], cancelled: Callable[[], bool]) -> None:
    """Compares the rows of the embedding that are among `wanted` with the same rows of a stored output layer.

    Does nothing for a model that is not tied, or stores no output layer. Raises CheckpointError "invalid" where they
    differ: whichever was meant, using the other makes the model answer nonsense; LoadCancelled.
    """
    embedding, head = checkpoint.tensors.get(_EMBEDDING), checkpoint.tensors.get(_HEAD)
    if not checkpoint.config.tie_word_embeddings or embedding is None or head is None:
        return
    for want in wanted:
        if want.name == _EMBEDDING:
            rows = (want.start, want.stop) if want.dim == 0 else (0, embedding.shape[0])
            _compare(embedding, head, rows, cancelled)


def _compare(embedding: TensorInfo, head: TensorInfo, rows: tuple[int, int], cancelled: Callable[[], bool]) -> None:
    if embedding.dtype != head.dtype and not {embedding.dtype, head.dtype} <= FLOAT_DTYPES.keys():
        raise _differs(embedding, head, rows[0])
    num_rows = embedding.shape[0]
    step = max(1, _CHUNK_BYTES * num_rows // max(embedding.num_bytes, head.num_bytes))
    with open_regular(embedding.file) as (first, _), open_regular(head.file) as (second, _):
        for start in range(*rows, step):
            if cancelled():
                raise LoadCancelled
            stop = min(start + step, rows[1])
            left, right = _read(first, embedding, start, stop), _read(second, head, start, stop)
            if not torch.equal(left, right):
                row = start + int((left != right).any(dim=1).nonzero()[0])
                raise _differs(embedding, head, row)


def _read(descriptor: int, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """The rows as float32, in which every type that is converted has all its values; else as bytes."""
    data = read_rows(descriptor, info, start, stop)
    if info.dtype not in FLOAT_DTYPES:
        return torch.frombuffer(data, dtype=torch.uint8).view(stop - start, -1)
    values = torch.frombuffer(data, dtype=FLOAT_DTYPES[info.dtype])
    return values.float().nan_to_num().view(stop - start, -1)


def _differs(embedding: TensorInfo, head: TensorInfo, row: int) -> CheckpointError:
    return CheckpointError(
        "invalid",
        f"{head.file} holds tensor {head.name!r}, which differs from {embedding.name!r} in row {row}, while the "
        "config says that they are one (tie_word_embeddings)",
        "set tie_word_embeddings to false if the model has an output layer of its own, or else remove that tensor",
        file=head.file,
        tensor=head.name,
        expected=f"the values of {embedding.name}",
        found=f"another row {row}",
    )
