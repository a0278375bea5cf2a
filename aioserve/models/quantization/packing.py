"""Packing of several small numbers into a word, and 8-bit floats."""

from __future__ import annotations

import numpy as np

from aioserve.errors import WeightsError
from aioserve.models.stored import Floats

__all__ = ["E4M3", "e4m3_bits", "e4m3_scales", "e8m0", "packed", "unpacked"]


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack numbers of 2, 3, 4 or 8 bits from the first axis of int32 words: uint8 [numbers, ...].

    The first number is in the lowest bits. Three words hold 32 numbers of 3 bits, and some of these
    cross words.
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


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack numbers of 4 or 8 bits, uint8 [rows, numbers], along the last axis into int32 words.

    The first number is in the lowest bits. Zeros pad the last word of a row."""
    in_word = 32 // bits
    whole = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % in_word))).astype(np.uint32)
    shifts = np.arange(in_word, dtype=np.uint32) * np.uint32(bits)
    words = whole.reshape(len(numbers), -1, in_word) << shifts
    return np.bitwise_or.reduce(words, axis=2).view(np.int32)


def _e4m3() -> Floats:
    bits = np.arange(256, dtype=np.int64)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)


E4M3: Floats = _e4m3()
"""Value of each float8_e4m3fn by its bits: no infinities, largest 448.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022."""


_E4M3_LARGEST = np.float32(448)


def _e4m3_ends() -> Floats:
    """Largest number that rounds to each code from 0 to 125: to nearest, ties to the even code."""
    middles = (E4M3[:126] + E4M3[1:127]) / np.float32(2)
    odd = np.arange(126) % 2 == 1
    return np.where(odd, np.nextafter(middles, np.float32(0)), middles)


_E4M3_ENDS = _e4m3_ends()


def e4m3_bits(weight: Floats) -> np.ndarray:
    """Round finite numbers to float8_e4m3fn, uint8: ties to even, and saturate at the largest."""
    magnitude = np.searchsorted(_E4M3_ENDS, np.abs(weight)).astype(np.uint8)
    return magnitude | (np.signbit(weight).astype(np.uint8) << 7)


def e4m3_scales(weight: Floats) -> Floats:
    """Scales that map the largest magnitude of each row to E4M3's largest: float32 [rows, 1].

    Raises `WeightsError` for NaN and infinity."""
    if not np.isfinite(weight).all():
        raise WeightsError("NaN and infinity can't be quantised")
    return np.abs(weight).max(axis=1, keepdims=True) / _E4M3_LARGEST


def e8m0(bits: np.ndarray) -> Floats:
    """Decode scales that are exponents, uint8: 2 ** (bits - 127), and NaN for 255.

    OCP Microscaling Formats, 1.0."""
    scales = np.exp2(bits.astype(np.float64) - 127)
    return np.where(bits == 255, np.nan, scales).astype(np.float32)
