"""Weights of integers for tests, and their product as `native/linear/grouped/tile.h` states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.ops.native_grouped import GroupedWeight

Floats = npt.NDArray[np.float32]

Kept = Literal["float32", "float16", "bfloat16", "multiples", "zero points"]
KEPT: tuple[Kept, ...] = ("float32", "float16", "bfloat16", "multiples", "zero points")
"""Kinds of scales and minimums. "zero points" has scales in float16, and no other minimums."""

TABLE = 0
"""Value for `bits` that means 4-bit codes of `NUMBERS`."""
NUMBERS = (-128, -104, -83, 127, -65, -49, 53, 0, -35, 0, 38, 1, 89, -10, 25, 3)

SMALLEST = np.float32(2.0**-119)
MOST = np.float32(127)


@dataclass(slots=True, frozen=True)
class Integers:
    """Values [out, in], scales and minimums [out, groups]."""

    values: npt.NDArray[np.int8]
    scales: Floats
    minimums: Floats | None
    group_size: int
    bits: int
    kept: Kept = "float32"

    def weight(self, dtype: torch.dtype, bias: Tensor | None = None) -> GroupedWeight:
        weight = self.empty(dtype)
        weight.set_rows(0, self.values, self.scales, self.minimums)
        if bias is not None:
            weight.set_bias(bias)
        return weight

    def empty(self, dtype: torch.dtype) -> GroupedWeight:
        out_features, in_features = self.values.shape
        return GroupedWeight(
            out_features,
            in_features,
            group_size=self.group_size,
            bits=self.bits or 4,
            table=None if self.bits else NUMBERS,
            has_minimums=self.minimums is not None,
            scales="float16" if self.kept == "zero points" else self.kept,
            has_zero_points=self.kept == "zero points" and self.minimums is not None,
            dtype=dtype,
        )

    def dequantized(self) -> Floats:
        scaled = self.values.astype(np.float32) * self._each(self.scales)
        return scaled if self.minimums is None else scaled + self._each(self.minimums)

    def _each(self, parameters: Floats) -> Floats:
        return np.repeat(parameters, self.group_size, axis=1)[:, : self.values.shape[1]]


def random_integers(
    out_features: int,
    in_features: int,
    group_size: int,
    bits: int,
    has_minimums: bool,
    kept: Kept = "float32",
    seed: int = 0,
) -> Integers:
    """Draw an asymmetric weight with scales of any size, and the largest values in one input."""
    random = np.random.default_rng(seed + 1000 * out_features + in_features)
    numbers = numbers_of(bits, has_minimums)
    values = random.choice(numbers, (out_features, in_features))
    values[:, in_features // 3] = numbers.max()
    groups = -(-in_features // group_size)
    scales = parameters(random, out_features, groups, group_size, kept)
    minimums = -parameters(random, out_features, groups, group_size, kept) if has_minimums else None
    if minimums is not None and kept == "zero points":
        minimums = -(random.integers(-128, 128, scales.shape).astype(np.float32) * scales)
    elif minimums is not None and kept != "multiples":
        minimums[::3] *= -1
    return Integers(values, scales, minimums, group_size, bits, kept)


def numbers_of(bits: int, has_minimums: bool) -> npt.NDArray[np.int8]:
    """Return all possible values."""
    if bits == TABLE:
        return np.array(NUMBERS, np.int8)
    low = 0 if has_minimums and bits < 8 else -(1 << (bits - 1))
    return np.arange(low, low + (1 << bits)).astype(np.int8)


def parameters(
    random: np.random.Generator, out_features: int, groups: int, group_size: int, kept: Kept
) -> Floats:
    """Draw scales, or magnitudes of minimums, that this kind holds exactly. Some are 0."""
    if kept != "multiples":
        scales = np.exp(random.normal(-4, 1, (out_features, groups))).astype(np.float32)
        scales[::7, ::2] = 0
        if kept == "bfloat16":
            return torch.from_numpy(scales).bfloat16().float().numpy()
        return scales if kept == "float32" else scales.astype(np.float16).astype(np.float32)
    per_number = max(256 // group_size, 1)
    shape = (out_features, -(-groups // per_number))
    numbers = np.exp(random.normal(-8, 1, shape)).astype(np.float16).astype(np.float32)
    multiples = random.integers(0, 64, (out_features, groups)).astype(np.float32)
    return multiples * np.repeat(numbers, per_number, axis=1)[:, :groups]


def random_rows(rows: int, in_features: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw rows with an outlier column, as in activations of models."""
    generator = torch.Generator().manual_seed(seed + 1000 * rows + in_features)
    x = torch.randn(rows, in_features, generator=generator)
    x[:, in_features // 2] *= 30
    return x.to(dtype)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Compute a * b + c with one rounding.

    The product is exact in float64. The sum is rounded to odd, so that a second rounding gives the
    rounded exact sum (Boldo and Melquiond, 2008)."""
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b, c.astype(np.float64))
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64).copy()
    even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    bits += np.where(even, np.where((error > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


def product(x: Tensor, weight: Integers, bias: Tensor | None = None) -> Tensor:
    """Compute the kernels' product in float32, bit for bit."""
    size = weight.group_size if weight.group_size in (16, 32, 64) else 128
    rows = x.float().numpy()
    y = np.zeros((len(rows), len(weight.values)), np.float32)
    for begin in range(0, rows.shape[1], size):
        part = rows[:, begin : begin + size]
        amax = np.abs(part).max(axis=1, keepdims=True)
        is_zero = amax < SMALLEST
        factor = np.where(is_zero, np.float32(0), MOST / np.maximum(amax, SMALLEST))
        integers = np.rint(part * factor).astype(np.int64)
        row_scale = np.where(is_zero, np.float32(0), amax / MOST)
        group = begin // weight.group_size
        values = weight.values[:, begin : begin + size].astype(np.int64)
        total = (integers @ values.T).astype(np.float32)
        scale = weight.scales[:, group]
        if weight.minimums is None:
            term = scale * total
        else:
            row_sum = integers.sum(axis=1, keepdims=True).astype(np.float32)
            term = fused(scale, total, weight.minimums[:, group] * row_sum)
        y = fused(row_scale, term, y)
    return torch.from_numpy(y if bias is None else y + bias.float().numpy())
