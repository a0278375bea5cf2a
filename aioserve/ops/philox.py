"""Counter-based noise: a random number as a pure function of (seed, position).

There is no state to carry, so a draw doesn't depend on the batch, on the order of rows, or on how
often a sequence was preempted and computed again. Knows numbers alone.

Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["philox4x32", "uniforms"]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_11 = np.uint64(11)
_UNIT = 2.0**-53

Words = npt.NDArray[np.uint64]


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds for every row: counter uint64 `[N, 4]`, key uint64 `[N, 2]` -> uint64 `[N, 4]`.

    Each entry holds one 32-bit word.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits: float64 `[N]`.

    The key is the seed, the counter is the position; both are below 2**64. The upper half of the
    counter is 0 here, free for further draws at the same position.
    """
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack((position & _LOW, position >> _32, zero, zero), axis=1)
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _32), axis=1))
    return ((words[:, 1] << _32 | words[:, 0]) >> _11).astype(np.float64) * _UNIT
