"""Random blocks of the GGUF types."""

import numpy as np
from numpy.typing import NDArray

from loader.gguf_format import GGML_TYPES

BLOCKS = {name: (values, size) for name, values, size in GGML_TYPES.values() if values > 1}
# Where float16 scales lie in a block: random bytes there would be NaN or infinite.
_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def block_bytes(name: str) -> int:
    """Of one block."""
    return BLOCKS[name][1]


def random_blocks(name: str, num_blocks: int, *, seed: int = 0, size: float = 1.0) -> NDArray[np.uint8]:
    """uint8 [num_blocks, bytes], whose scales are about `size`."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, block_bytes(name)), dtype=np.uint8)
    for offset in _SCALES[name]:
        scales = (rng.standard_normal(num_blocks) * size).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
    return blocks
