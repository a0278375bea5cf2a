"""Small numbers that files keep several of in one word, and floats of 8 bits and fewer."""

from __future__ import annotations

import numpy as np

from aioserve.models.stored import Floats

__all__ = ["E4M3", "e8m0", "unpacked"]


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of 2, 3, 4 or 8 bits along the first axis of int32 words: uint8 [numbers, ...].

    The first number is in the lowest bits. Of 3 bits 32 numbers are in three words, and some lie
    in two of them.
    """
    words = words.view(np.uint32)
    period = 32 if 32 % bits else 32 // bits
    words_in_period = period * bits // 32
    grouped = words.reshape(-1, words_in_period, *words.shape[1:])
    numbers = np.empty((len(grouped), period, *words.shape[1:]), np.uint8)
    for place in range(period):
        word, shift = divmod(place * bits, 32)
        number = grouped[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            number |= grouped[:, word + 1] << np.uint32(32 - shift)
        numbers[:, place] = number & np.uint32((1 << bits) - 1)
    return numbers.reshape(-1, *words.shape[1:])


def _e4m3() -> Floats:
    bits = np.arange(256, dtype=np.int64)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)


E4M3: Floats = _e4m3()
"""float8_e4m3fn by its bits: no infinities, largest 448 (Micikevicius et al., "FP8 Formats for
Deep Learning", 2022)."""


def e8m0(bits: np.ndarray) -> Floats:
    """Scales that are an exponent alone, uint8: 2 ** (bits - 127), and NaN for 255 (OCP
    Microscaling Formats, 1.0)."""
    scales = np.exp2(bits.astype(np.float64) - 127)
    return np.where(bits == 255, np.nan, scales).astype(np.float32)
