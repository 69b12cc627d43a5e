"""Counter-based random numbers: a draw is a function of its key alone, not of what was drawn before."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: NDArray[np.uint64], sequence_indices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sequence index, output position), all of shape [rows]; 53 random bits.

    Chained SplitMix64: each key word is added to the hash of those before it, so that no two keys
    of one seed collide by addition.
    """
    state = _mix(seeds)
    state = _mix(state + sequence_indices.astype(np.uint64))
    state = _mix(state + positions.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
