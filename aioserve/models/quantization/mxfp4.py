"""MXFP4 of compressed-tensors: E2M1, two in each byte along the inputs, the first in the low bits,
and a scale for each 32 inputs that is an exponent (OCP Microscaling Formats, 1.0).

Twice such a number is an integer, so weights are integers with half the scale, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioserve.models.architecture import Tensor
from aioserve.models.grouped import E2M1_TWICE, GroupedIntegers
from aioserve.models.quantization.packing import e8m0
from aioserve.models.quantization.scheme import Parts
from aioserve.models.stored import Format, IntegerForm, StoredLinear

__all__ = ["GROUP_SIZE", "Mxfp4"]

GROUP_SIZE = 32

_TWICE = np.array(E2M1_TWICE, np.int8)
_PAIRS = np.stack((np.tile(_TWICE, 16), np.repeat(_TWICE, 16)), axis=1)
"""What each byte stands for, its low bits first: int8 [256, 2]."""


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """The parts "weight", uint8 [out, in / 2], and "scales", uint8 [out, groups]."""

    @property
    def name(self) -> str:
        return "mxfp4"

    def described(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        rows, columns = tensor.rows, tensor.columns
        if columns % GROUP_SIZE:
            parts.refuse(f"{columns} inputs are no whole groups of {GROUP_SIZE}")
        read = {
            "weight": parts.take("weight_packed", ("U8",), (rows, columns // 2)),
            "scales": parts.take("weight_scale", ("U8", "F8_E8M0"), (rows, columns // GROUP_SIZE)),
        }
        return StoredLinear(self, read, rows, columns, GROUP_SIZE)

    def integers(self, stored: StoredLinear) -> IntegerForm:
        return IntegerForm(4, GROUP_SIZE, False, "bfloat16", table=E2M1_TWICE)

    def rows(self, stored: StoredLinear, first: int, end: int) -> GroupedIntegers:
        values = _PAIRS[stored.parts["weight"].read(first, end)]
        return GroupedIntegers(
            values=values.reshape(end - first, stored.in_features),
            scales=e8m0(stored.parts["scales"].read(first, end)) / np.float32(2),
            zeros=None,
            minimums=None,
            group_size=GROUP_SIZE,
            bits=4,
            table=E2M1_TWICE,
        )
