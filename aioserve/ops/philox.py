"""Counter-based noise: a random number as a pure function of (seed, position, token id).

There is no state to carry. A draw doesn't depend on the batch, on the order of rows, or on how
often a sequence was preempted and computed again. A token's noise doesn't depend on the other
tokens that may be drawn. Knows only numbers.

Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["exponentials", "philox4x32", "second_draws"]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32, _11 = np.uint64(32), np.uint64(11)
_TOKENS, _CALLS = np.int64(64), np.int64(16)
_UPPER, _LOWER, _SECOND = 1, 2, 3
_HALF = np.uint64(1 << 63)
_UNIT = 2.0**-64

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


def exponentials(
    seed: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """A number for each of `token_ids`, int64 `[N]`: float64 `[N]`, from 2**-65 to 45.1.

    They are exponentially distributed with a mean of 1. `seed` and `position` are below 2**64, ids
    below 2**34.

    The key is the seed. The lower half of the counter is the position. Then come the number of a
    call, and 1 for the upper halves of 64 random bits or 2 for the lower halves. Call 16 b + l
    gives its four words to the tokens 64 b + 16 j + l for j from 0 to 3. So the calls in the lanes
    of a vector give words to neighbouring tokens.
    """
    calls = (token_ids // _TOKENS * _CALLS + token_ids % _CALLS).astype(np.uint64)
    own = (token_ids // _CALLS % 4)[:, None]
    counter = np.empty((len(token_ids), 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2] = position & 0xFFFFFFFF, position >> 32, calls
    key = np.broadcast_to(np.array((seed & 0xFFFFFFFF, seed >> 32), np.uint64), (len(calls), 2))
    words = []
    for half in (_UPPER, _LOWER):
        counter[:, 3] = half
        words.append(np.take_along_axis(philox4x32(counter, key), own, axis=1)[:, 0])
    bits = words[0] << _32 | words[1]
    # Near either end of the unit interval the distance is exact to the last bit.
    distance = (np.minimum(bits, ~bits).astype(np.float64) + 0.5) * _UNIT
    return np.where(bits >= _HALF, -np.log(distance), -np.log1p(-distance))


def second_draws(seeds: Words, positions: Words) -> tuple[npt.NDArray[np.float64], Words]:
    """A number in [0, 1), evenly distributed, and a seed, for each of `seeds` and the position
    beside it. All are uint64 `[N]`, except for the numbers: float64 `[N]`.

    They serve a second draw at a position whose `exponentials` have drawn a token, and are
    independent of these, as the last word of the counter is 3. The other words are those of the
    position and 0. The upper 53 of the first 64 bits are the number, the other 64 the seed.
    """
    counter = np.zeros((len(seeds), 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 3] = positions & _LOW, positions >> _32, _SECOND
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _32), axis=1))
    bits = words[:, 0] << _32 | words[:, 1]
    return (bits >> _11).astype(np.float64) * 2.0**-53, words[:, 2] << _32 | words[:, 3]
