"""MXFP4 of compressed-tensors and of GPT-OSS (OCP Microscaling Formats, 1.0).

A byte has two E2M1 floats along the inputs, the first in its low bits. Every 32 inputs share a
scale, an exponent. Twice an E2M1 float is an integer, so that weights are integers with half the
scale, exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.packing import e8m0
from aioserve.models.quantization.scheme import Parts, Scheme
from aioserve.models.stored import Format, IntegerForm, StoredLinear
from aioserve.models.weight_integers import E2M1_TWICE, WeightIntegers

__all__ = ["GROUP_SIZE", "Mxfp4", "Mxfp4Experts"]

GROUP_SIZE = 32

_TWICE = np.array(E2M1_TWICE, np.int8)
_PAIRS = np.stack((np.tile(_TWICE, 16), np.repeat(_TWICE, 16)), axis=1)
"""Two integers for each byte, that of its low bits first: int8 [256, 2]."""


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """Format with the parts "weight" and "scales".

    "weight" is uint8 [out, in / 2] or [out, groups, 16]; "scales" is uint8 [out, groups]."""

    @property
    def name(self) -> str:
        return "mxfp4"

    def described(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        rows, columns = tensor.rows, tensor.columns
        if columns % GROUP_SIZE:
            parts.refuse(f"{columns} inputs are no whole groups of {GROUP_SIZE}")
        groups = columns // GROUP_SIZE
        found = parts.found.get("weight_packed")
        blocks = found is not None and len(found.shape) == 3
        shape = (rows, groups, GROUP_SIZE // 2) if blocks else (rows, columns // 2)
        read = {
            "weight": parts.take("weight_packed", ("U8",), shape),
            "scales": parts.take("weight_scale", ("U8", "F8_E8M0"), (rows, groups)),
        }
        return StoredLinear(self, read, rows, columns, GROUP_SIZE)

    def integers(self, stored: StoredLinear) -> IntegerForm:
        return IntegerForm(4, GROUP_SIZE, False, "bfloat16", table=E2M1_TWICE)

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightIntegers:
        values = _PAIRS[stored.parts["weight"].read(first, end)]
        return WeightIntegers(
            values=values.reshape(end - first, stored.in_features),
            scales=e8m0(stored.parts["scales"].read(first, end)) / np.float32(2),
            zeros=None,
            minimums=None,
            group_size=GROUP_SIZE,
            bits=4,
            table=E2M1_TWICE,
        )


@dataclass(frozen=True, slots=True)
class Mxfp4Experts(Scheme):
    """Method "mxfp4", in which GPT-OSS stores its experts."""

    precision = "int4"
    unread: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")

    @classmethod
    def read(cls, fields: Fields) -> Mxfp4Experts:
        """Read `quantization_config`, which has only the name of the method.

        The files show which weights are plain."""
        return cls()

    @property
    def name(self) -> str:
        return "mxfp4"

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        return Mxfp4().described(tensor, parts)
