"""Rounding of floats to blocks of GGUF's formats: the reverse of `formats`.

Layouts and values are those of `formats`. The rounding is our own. Each group tries some scales,
and perhaps minimums, and keeps those with the least squared error. Each try is fitted to the
integers that it gives, as in llama.cpp, but with other weights. Formats with 256 values in a block
then round the scales of its groups to small multiples of a float16. After that, they round the
values again. No files and no torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.models.gguf.formats import Floats, GGUFFormat

__all__ = ["ENCODED", "encoded"]

Blocks = npt.NDArray[np.void]
Numbers = npt.NDArray[Any]

_TRIES = np.arange(-9, 10, dtype=np.float32) / 10
"""Offsets, in steps, of the largest integer that are tried."""
_LARGEST_F16 = np.float32(65504)


def encoded(form: GGUFFormat, weight: Floats) -> npt.NDArray[np.uint8]:
    """Encode rows, float32 [out, in], into blocks, uint8 [out, bytes of a row].

    The format must be in `ENCODED`, and rows must be whole blocks. Raises `WeightsError` for NaN,
    infinity, and numbers beyond the range of the format's scales.
    """
    if not np.isfinite(weight).all():
        raise WeightsError("NaN and infinity can't be quantised")
    if form.name not in ("F32", "BF16") and np.abs(weight).max(initial=0) > _LARGEST_F16 * 128:
        raise _beyond()
    values = np.ascontiguousarray(weight, np.float32)
    blocks = np.zeros((len(values), values.shape[1] // form.values_per_block), form.block)
    ENCODED[form.name](values.reshape(*blocks.shape, form.values_per_block), blocks)
    return blocks.view(np.uint8).reshape(len(values), -1)


def _beyond() -> WeightsError:
    return WeightsError("its scales are beyond 65504, the most that float16 holds")


def _half(scales: Floats) -> Floats:
    """Round scales to float16. Raises `WeightsError` beyond its range."""
    if (np.abs(scales) > _LARGEST_F16).any():
        raise _beyond()
    return scales.astype(np.float16).astype(np.float32)


def _over(values: Numbers, by: Numbers) -> Floats:
    """Divide `values` by `by`, with zero where the divisor is zero."""
    return np.divide(
        values,
        by,
        out=np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32),
        where=by != 0,
    )


def _symmetric(groups: Floats, most: int) -> Floats:
    """Choose a scale [..., 1] for each group [..., n] of integers in [-most, most)."""
    at = np.abs(groups).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(groups, at, axis=-1)
    best, best_gain = np.zeros_like(largest), np.full_like(largest, -1)
    for more in _TRIES:
        integers = np.clip(np.rint(_over(groups * -(most + more), largest)), -most, most - 1)
        product = (groups * integers).sum(axis=-1, keepdims=True)
        square = np.square(integers).sum(axis=-1, keepdims=True)
        # The scale product / square leaves |x|**2 - product**2 / square.
        scale = _over(product, square)
        gain = product * scale
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best, scale, where=better)
    return best


def _affine(groups: Floats, most: int, *, below_zero: bool) -> tuple[Floats, Floats]:
    """Choose a scale and a minimum [..., 1] for each group [..., n] of integers in [0, most].

    With `below_zero`, minimums are at most zero."""
    count = groups.shape[-1]
    least = groups.min(axis=-1, keepdims=True)
    if below_zero:
        least = np.minimum(least, 0)
    largest = groups.max(axis=-1, keepdims=True)
    total = groups.sum(axis=-1, keepdims=True)
    scale, minimum = (largest - least) / np.float32(most), least
    integers = np.clip(np.rint(_over(groups - least, scale)), 0, most)
    best_error = np.square(integers * scale + minimum - groups).sum(axis=-1, keepdims=True)
    best, best_minimum = scale, minimum
    for more in _TRIES:
        # The best minimum so far is the base: an outlier may move it far from the least value.
        steps = (groups - best_minimum) * (most + more)
        integers = np.clip(np.rint(_over(steps, largest - best_minimum)), 0, most)
        ones = integers.sum(axis=-1, keepdims=True)
        squares = np.square(integers).sum(axis=-1, keepdims=True)
        products = (integers * groups).sum(axis=-1, keepdims=True)
        determinant = count * squares - ones * ones
        scale = _over(count * products - total * ones, determinant)
        minimum = _over(squares * total - ones * products, determinant)
        if below_zero:
            above = minimum > 0
            scale = np.where(above, _over(products, squares), scale)
            minimum = np.where(above, 0, minimum)
        error = np.square(integers * scale + minimum - groups).sum(axis=-1, keepdims=True)
        better = (error < best_error) & (scale > 0)
        best_error = np.where(better, error, best_error)
        best = np.where(better, scale, best)
        best_minimum = np.where(better, minimum, best_minimum)
    return best, best_minimum


def _nearest(groups: Numbers, scales: Numbers, least: int, most: int) -> npt.NDArray[np.uint8]:
    """Round to integers from `least` to `most`, and subtract `least`."""
    return (np.clip(np.rint(_over(groups, scales)), least, most) - least).astype(np.uint8)


def _packed(values: Numbers, bits: int, run: int) -> npt.NDArray[np.uint8]:
    """Pack values [..., n] of `bits` bits into bytes.

    In each run of `run` bytes, the first values are in the lowest bits, the next in higher ones."""
    per_byte = 8 // bits
    parts = values.reshape(*values.shape[:-1], -1, per_byte, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(parts << shifts, axis=-2).reshape(*values.shape[:-1], -1)


# -- 32 values with a scale of their own, and perhaps a minimum


def _q8_0(groups: Floats, blocks: Blocks) -> None:
    scales = _half(np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127))
    blocks["d"] = scales[..., 0]
    blocks["qs"] = np.clip(np.rint(_over(groups, scales)), -127, 127)


def _without_minimum(groups: Floats, blocks: Blocks, bits: int) -> None:
    most = 1 << (bits - 1)
    scales = _half(_symmetric(groups, most))
    blocks["d"] = scales[..., 0]
    _store_small(_nearest(groups, scales, -most, most - 1), blocks)


def _with_minimum(groups: Floats, blocks: Blocks, bits: int) -> None:
    most = (1 << bits) - 1
    scales, minimums = (_half(part) for part in _affine(groups, most, below_zero=False))
    blocks["d"], blocks["m"] = scales[..., 0], minimums[..., 0]
    _store_small(_nearest(groups - minimums, scales, 0, most), blocks)


def _store_small(values: Numbers, blocks: Blocks) -> None:
    blocks["qs"] = _packed(values & 15, 4, 16)
    if "qh" in (blocks.dtype.names or ()):
        blocks["qh"] = np.packbits(values >> 4, axis=-1, bitorder="little")


# -- 256 values whose scales are small integers that share a float16


def _shared(scales: Floats, most: int) -> tuple[Floats, Floats]:
    """Return a float16 for each block, [..., 1], and its scales as multiples, [..., groups]."""
    at = np.abs(scales).argmax(axis=-1)[..., None]
    shared = _half(np.take_along_axis(scales, at, axis=-1) / np.float32(most))
    return shared, np.clip(np.rint(_over(scales, shared)), -abs(most), abs(most) - (most < 0))


def _best_near(
    groups: Floats,
    scales: tuple[Floats, Floats],
    minimums: tuple[Floats, Floats],
    most: int,
) -> tuple[Floats, Floats]:
    """Choose the multiples of scales and minimums that leave each group the least error.

    `scales` and `minimums` are pairs of shared numbers and multiples, and each multiple may change
    by at most 1. Returns new multiples of both, [..., groups]."""
    best = scales[1], minimums[1]
    least_error = np.full_like(best[0], np.inf)
    for more, deeper in itertools.product((0, 1, -1), repeat=2):
        scale, minimum = np.clip(scales[1] + more, 0, 63), np.clip(minimums[1] + deeper, 0, 63)
        each, down = (scales[0] * scale)[..., None], (minimums[0] * minimum)[..., None]
        integers = np.clip(np.rint(_over(groups + down, each)), 0, most)
        error = np.square(integers * each - down - groups).sum(axis=-1)
        better = error < least_error
        least_error = np.where(better, error, least_error)
        best = np.where(better, scale, best[0]), np.where(better, minimum, best[1])
    return best


def _k_with_minimum(groups: Floats, blocks: Blocks, bits: int) -> None:
    most = (1 << bits) - 1
    groups = groups.reshape(*blocks.shape, 8, 32)
    found = _affine(groups, most, below_zero=True)
    d, scales = _shared(found[0][..., 0], 63)
    dmin, minimums = _shared(-found[1][..., 0], 63)
    scales, minimums = _best_near(groups, (d, scales), (dmin, minimums), most)
    each, down = (d * scales)[..., None], (dmin * minimums)[..., None]
    values = _nearest(groups + down, each, 0, most).reshape(*blocks.shape, 256)
    blocks["d"], blocks["dmin"] = d[..., 0], dmin[..., 0]
    small, less = scales.astype(np.uint8), minimums.astype(np.uint8)
    stored = np.empty((*blocks.shape, 12), np.uint8)
    # The first four have six bits in a byte each. Above these are two bits of each of the others.
    stored[..., :4] = small[..., :4] | (small[..., 4:] >> 4) << 6
    stored[..., 4:8] = less[..., :4] | (less[..., 4:] >> 4) << 6
    stored[..., 8:] = (small[..., 4:] & 15) | (less[..., 4:] & 15) << 4
    blocks["scales"] = stored
    blocks["qs"] = _packed(values & 15, 4, 32)
    if bits == 5:
        blocks["qh"] = _packed(values >> 4, 1, 32)


def _q6_k(groups: Floats, blocks: Blocks) -> None:
    groups = groups.reshape(*blocks.shape, 16, 16)
    d, scales = _shared(_symmetric(groups, 32)[..., 0], -128)
    values = _nearest(groups, (d * scales)[..., None], -32, 31).reshape(*blocks.shape, 256)
    blocks["d"], blocks["scales"] = d[..., 0], scales
    blocks["ql"] = _packed(values & 15, 4, 64)
    blocks["qh"] = _packed(values >> 4, 2, 32)


# -- floats


def _f32(groups: Floats, blocks: Blocks) -> None:
    blocks["x"] = groups[..., 0]


def _f16(groups: Floats, blocks: Blocks) -> None:
    if (np.abs(groups) > _LARGEST_F16).any():
        raise _beyond()
    blocks["x"] = groups[..., 0]


def _bf16(groups: Floats, blocks: Blocks) -> None:
    bits = np.ascontiguousarray(groups[..., 0]).view(np.uint32)
    blocks["x"] = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16


ENCODED: Mapping[str, Callable[[Floats, Blocks], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": lambda groups, blocks: _without_minimum(groups, blocks, 4),
    "Q5_0": lambda groups, blocks: _without_minimum(groups, blocks, 5),
    "Q4_1": lambda groups, blocks: _with_minimum(groups, blocks, 4),
    "Q5_1": lambda groups, blocks: _with_minimum(groups, blocks, 5),
    "Q4_K": lambda groups, blocks: _k_with_minimum(groups, blocks, 4),
    "Q5_K": lambda groups, blocks: _k_with_minimum(groups, blocks, 5),
    "Q6_K": _q6_k,
}
"""Functions that fill blocks [out, blocks] from values [out, blocks, values], by format name."""
