# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportGeneralTypeIssues=false
"""The noise of `aioserve.ops.philox` on the device, bit for bit.

Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["noise"]


@triton.jit
def noise(seed, position):
    """uint64 below 2**64 whose upper 53 bits are `uniforms(seed, position)`; the rest are 0.

    Both are int64 that hold the bits of a uint64. The key is the seed, the counter the position.
    """
    low = tl.full([], 0xFFFFFFFF, tl.uint64)
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.uint64, bitcast=True)
    c0 = position & low
    c1 = position >> 32
    c2 = c0 & 0
    c3 = c0 & 0
    k0 = seed & low
    k1 = seed >> 32
    first = tl.full([], 0xD2511F53, tl.uint64)
    second = tl.full([], 0xCD9E8D57, tl.uint64)
    # Unsigned words of 32 bits, each in 64: products are exact.
    for _ in tl.static_range(10):
        product0 = first * c0
        product1 = second * c2
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & low
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return (((c1 << 32) | c0) >> 11) << 11
