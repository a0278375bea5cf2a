"""Floats of 8 bits with scales: of the whole weight, of each output, or of blocks of both axes.

Scales are multiplied with, whatever they are called; those of a dtype of 8 bits are exponents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.packing import E4M3, e8m0
from aioserve.models.quantization.scheme import FLOATS, Parts, Scheme, num_groups
from aioserve.models.stored import Floats, Format, StoredLinear, StoredTensor

__all__ = ["Float8", "Fp8"]

_SCALE_DTYPES = (*FLOATS, "F8_E8M0", "U8")
_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class Float8(Format):
    """E4M3 in the part "weight", and the part "scales" for blocks of (outputs, inputs): [blocks of
    outputs, blocks of inputs], in any shape of so many numbers."""

    block: tuple[int, int]

    @property
    def name(self) -> str:
        return f"fp8-e4m3-{self.block[0]}x{self.block[1]}"

    def integers(self, stored: StoredLinear) -> None:
        return None

    def rows(self, stored: StoredLinear, first: int, end: int) -> Floats:
        weight = E4M3[stored.parts["weight"].read(first, end)]
        block_rows, block_columns = self.block
        from_block, to_block = first // block_rows, num_groups(end, block_rows)
        part, across = stored.parts["scales"], num_groups(stored.in_features, block_columns)
        scales = _scales(part).reshape(-1, across)[from_block:to_block]
        start = from_block * block_rows
        scales = np.repeat(scales, block_rows, axis=0)[first - start : end - start]
        scales = np.repeat(scales, block_columns, axis=1)[:, : stored.in_features]
        return weight * scales


def _scales(part: StoredTensor) -> Floats:
    if part.dtype in FLOATS:
        return part.read_floats()
    return e8m0(part.read())


def described(
    tensor: Tensor, parts: Parts, scales: str, block: tuple[int, int] | None
) -> StoredLinear:
    """Description of a weight in E4M3 whose scales have that name: of blocks, or without them one
    for each output, or one in all."""
    rows, columns = tensor.rows, tensor.columns
    weight = parts.take("weight", ("F8_E4M3",), (rows, columns))
    if block is not None:
        block = min(block[0], rows), min(block[1], columns)  # files say any size
        shape = num_groups(rows, block[0]), num_groups(columns, block[1])
        found = parts.take(scales, _SCALE_DTYPES, shape)
    else:
        stored = parts.found.get(scales)
        one = stored is not None and stored.shape in ((), (1,), (1, 1))
        shape = stored.shape if stored is not None and one else (rows, 1)
        if stored is not None and stored.shape == (rows,):
            shape = (rows,)
        found = parts.take(scales, _SCALE_DTYPES, shape)
        block = (rows, columns) if one else (1, columns)
    return StoredLinear(Float8(block), {"weight": weight, "scales": found}, rows, columns)


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """The methods "fp8" and "fbgemm_fp8"."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: each output has one, or all have one."""

    precision = "fp8"
    unread: ClassVar[re.Pattern[str]] = re.compile(r"input_scale|[kv]_scale")

    @classmethod
    def read(cls, fields: Fields) -> Fp8:
        """From `quantization_config`. Raises `UnsupportedModelError` and `ModelError`."""
        kind = fields.text("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            fields.unsupported("fmt", "floats of 8 bits are read as e4m3")
        if not fields.has("weight_block_size"):
            return cls(None)
        outputs, inputs = fields.numbers("weight_block_size", 2)
        if not (outputs.is_integer() and inputs.is_integer() and outputs >= 1 and inputs >= 1):
            fields.unsupported("weight_block_size", "a block has whole numbers of rows and columns")
        return cls((int(outputs), int(inputs)))

    @property
    def name(self) -> str:
        return "fp8"

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        scales = next((name for name in _SCALES if name in parts), _SCALES[-1])
        return described(tensor, parts, scales, self.block)
