"""Weights that kernels multiply as dequantised floats, with these floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.models.quantization.packing import E4M3
from aioserve.ops.native import NativeLinear
from aioserve.ops.native_grouped import CodedWeight, GroupedWeight
from tests.ops.grouped_integers import KEPT, NUMBERS, TABLE, Integers, Kept, random_integers

Floats = npt.NDArray[np.float32]

Kind = tuple[int, bool, Kept] | Literal["e4m3", "numbers"]
"""Integers by bits, a flag for minimums, and the kind of scales; or the kind of codes."""

INTEGERS: tuple[Kind, ...] = tuple(
    (bits, has_minimums, kept)
    for bits in (8, 6, 5, 4, TABLE)
    for has_minimums in (False, True)
    for kept in KEPT
)
CODES: tuple[Kind, ...] = ("e4m3", "numbers")
KINDS = INTEGERS + CODES

_NEGATIVE = -1, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0
_POSITIVE = 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1
NF4: Floats = np.array(_NEGATIVE + _POSITIVE, np.float32)
NUMBER_CODES: npt.NDArray[np.uint8] = np.flatnonzero(~np.isnan(E4M3)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Parts of a weight, from which kernels are made, and its floats [out, in]."""

    floats: Floats
    integers: Integers | None
    codes: npt.NDArray[np.uint8]
    scales: Floats
    numbers: Floats | None
    group_size: int

    def empty(self, dtype: torch.dtype) -> GroupedWeight:
        out_features, in_features = self.floats.shape
        sizes = out_features, in_features
        one = self.integers
        if one is None:
            return CodedWeight(
                *sizes, group_size=self.group_size, numbers=self.numbers, dtype=dtype
            )
        return GroupedWeight(
            *sizes,
            group_size=one.group_size,
            bits=one.bits or 4,
            table=None if one.bits else NUMBERS,
            has_minimums=one.minimums is not None,
            scales="float16" if one.kept == "zero points" else one.kept,
            has_zero_points=one.kept == "zero points" and one.minimums is not None,
            in_floats=True,
            dtype=dtype,
        )

    def weight(self, dtype: torch.dtype, bias: Tensor | None = None) -> GroupedWeight:
        weight, one = self.empty(dtype), self.integers
        if one is None:
            weight.set_rows(0, self.codes.view(np.int8), self.scales)
        else:
            weight.set_rows(0, one.values, one.scales, one.minimums)
        if bias is not None:
            weight.set_bias(bias)
        return weight

    def plain(self, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self.floats).to(dtype)

    def pair(
        self, dtype: torch.dtype, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> tuple[NativeLinear, NativeLinear]:
        """Make the layer, and the layer of floats whose results it must have."""
        floats = NativeLinear(self.plain(dtype), bias, out_dtype=out_dtype)
        return self.weight(dtype, bias).linear(out_dtype), floats


def random_weight(
    out_features: int, in_features: int, group_size: int, kind: Kind, seed: int = 0
) -> Decoded:
    """Draw a weight with all possible codes, and scales of any size and sign, some of them 0."""
    if not isinstance(kind, str):
        bits, has_minimums, kept = kind
        one = random_integers(out_features, in_features, group_size, bits, has_minimums, kept, seed)
        return of_integers(one)
    random = np.random.default_rng(seed + 1000 * out_features + in_features)
    shape = out_features, -(-in_features // group_size)
    scales = np.exp(random.normal(-4, 2, shape)).astype(np.float32)
    scales[1::3] *= -1
    scales[::7, ::2] = 0
    numbers = None if kind == "e4m3" else NF4
    places = NUMBER_CODES if numbers is None else np.arange(16, dtype=np.uint8)
    return of_codes(random.choice(places, (out_features, in_features)), scales, numbers, group_size)


def of_integers(one: Integers) -> Decoded:
    values = one.values.astype(np.float32)
    each = np.repeat(one.scales, one.group_size, axis=1)[:, : values.shape[1]]
    floats = one.dequantized()
    if one.minimums is not None and one.kept == "zero points":
        down = -np.repeat(one.minimums, one.group_size, axis=1)[:, : values.shape[1]]
        points = np.rint(np.divide(down, each, out=np.zeros_like(down), where=each != 0))
        floats = (values - points) * each
    return Decoded(floats, one, values.astype(np.uint8), one.scales, None, one.group_size)


def of_codes(
    codes: npt.NDArray[np.uint8], scales: Floats, numbers: Floats | None, group_size: int
) -> Decoded:
    each = np.repeat(scales, group_size, axis=1)[:, : codes.shape[1]]
    floats = (E4M3 if numbers is None else numbers)[codes] * each
    return Decoded(floats, None, codes, scales, numbers, group_size)
