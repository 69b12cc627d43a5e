"""Reads stored tensors in the plainest way there is, to hold the reader against."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.tensors import TensorInfo


def read_slowly(info: TensorInfo) -> NDArray[Any]:
    """A whole unquantised tensor, joined from its pieces, as float32."""
    if info.pieces:
        return np.concatenate([read_slowly(piece.info) for piece in info.pieces], axis=info.pieces[0].dim)
    data = info.file.read_bytes()[info.offset : info.offset + info.num_bytes]
    if info.dtype == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[info.dtype]).astype(np.float32)
    return values.reshape(info.shape)
