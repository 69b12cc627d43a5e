"""Reading rows of a small tensor straight from its file, where a load of the whole checkpoint is not wanted."""

import torch

from loader.errors import CheckpointError
from loader.files import read_exactly
from loader.tensors import TensorInfo

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The float types that are converted into one another, by their storage name."""


def read_rows(descriptor: int, info: TensorInfo, start: int, stop: int) -> bytearray:
    """The bytes of the rows `[start, stop)` of a tensor of the open file.

    Raises CheckpointError "invalid" where the file ends before them, which it did not when it was opened.
    """
    row_bytes = info.num_bytes // max(1, info.shape[0])
    data = bytearray(read_exactly(descriptor, (stop - start) * row_bytes, info.offset + start * row_bytes))
    if len(data) != (stop - start) * row_bytes:
        raise CheckpointError(
            "invalid",
            f"{info.file} became shorter while it was read",
            "wait until the download has ended, then load again",
            file=info.file,
            tensor=info.name,
        )
    return data
