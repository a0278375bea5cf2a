"""E4M3 floats with scales: one for the weight, one for each output, or one for each block.

Weights are multiplied by scales, including those named "inv". 8-bit scales are exponents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.quantization.packing import E4M3, e8m0
from aioserve.models.quantization.scheme import FLOATS, Parts, Scheme, num_groups
from aioserve.models.stored import (
    SCALES_OF_DTYPE,
    CodeForm,
    Floats,
    Format,
    StoredLinear,
    StoredTensor,
)
from aioserve.models.weight_codes import WeightCodes

__all__ = ["Float8", "Fp8", "block_of"]

_SCALE_DTYPES = (*FLOATS, "F8_E8M0", "U8")
_SCALES = ("weight_scale_inv", "weight_scale")
_SPELLED_BLOCK = re.compile(r"\s*(\d{1,9})\s*x\s*(\d{1,9})\s*")
_ACTIVATIONS = ("dynamic", "static")
"""Values of `activation_scheme` that ask for E4M3 activations."""


@dataclass(frozen=True, slots=True)
class Float8(Format):
    """E4M3 in the part "weight", with "scales" for blocks of (outputs, inputs).

    Scales are [blocks of outputs, blocks of inputs], or any shape with the same numbers."""

    block: tuple[int, int]
    float_activations: bool = False

    @property
    def name(self) -> str:
        activations = "-a8" if self.float_activations else ""
        return f"fp8-e4m3-{self.block[0]}x{self.block[1]}{activations}"

    def integers(self, stored: StoredLinear) -> None:
        return None

    def codes(self, stored: StoredLinear) -> CodeForm:
        outputs, inputs = self.block
        # Bfloat16 holds powers of two exactly.
        kind = SCALES_OF_DTYPE.get(stored.parts["scales"].dtype, "bfloat16")
        return CodeForm(
            inputs, scales=kind, alike=outputs, float_activations=self.float_activations
        )

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightCodes:
        block_rows, block_columns = self.block
        from_block, to_block = first // block_rows, num_groups(end, block_rows)
        part, across = stored.parts["scales"], num_groups(stored.in_features, block_columns)
        scales = _scales(part).reshape(-1, across)[from_block:to_block]
        start = from_block * block_rows
        scales = np.repeat(scales, block_rows, axis=0)[first - start : end - start]
        codes = stored.parts["weight"].read(first, end)
        return WeightCodes(codes, E4M3, scales, block_columns)


def _scales(part: StoredTensor) -> Floats:
    if part.dtype in FLOATS:
        return part.read_floats()
    return e8m0(part.read())


def described(
    tensor: Tensor,
    parts: Parts,
    scales: str,
    block: tuple[int, int] | None,
    float_activations: bool,
) -> StoredLinear:
    """Describe a weight in E4M3 whose scales are in the part named `scales`.

    - block: outputs and inputs that share a scale; None: there is one scale for each output, or one
      for the weight.
    - float_activations: True if rows should become E4M3."""
    rows, columns = tensor.rows, tensor.columns
    weight = parts.take("weight", ("F8_E4M3",), (rows, columns))
    if block is not None:
        block = min(block[0], rows), min(block[1], columns)  # blocks may exceed the weight
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
    format_ = Float8(block, float_activations)
    return StoredLinear(format_, {"weight": weight, "scales": found}, rows, columns)


def block_of(fields: Fields, name: str) -> tuple[int, int]:
    """Read the outputs and inputs of a block: a list, or in some files a text like "128x128".

    Raises `UnsupportedModelError` and `ModelError`."""
    said = fields.values.get(name)
    if isinstance(said, str) and (parts := _SPELLED_BLOCK.fullmatch(said)):
        fields = Fields({name: [int(parts[1]), int(parts[2])]}, fields.source, fields.path)
    outputs, inputs = fields.numbers(name, 2)
    if not (outputs.is_integer() and inputs.is_integer() and outputs >= 1 and inputs >= 1):
        fields.unsupported(name, "a block has whole numbers of rows and columns")
    return int(outputs), int(inputs)


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """Methods "fp8" and "fbgemm_fp8"."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: each output has a scale, or all share one."""
    float_activations: bool

    precision = "fp8"
    unread: ClassVar[re.Pattern[str]] = re.compile(r"input_scale|[kv]_scale")

    @classmethod
    def read(cls, fields: Fields) -> Fp8:
        """Read `quantization_config`. Raises `UnsupportedModelError` and `ModelError`."""
        kind = fields.text("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            fields.unsupported("fmt", "floats of 8 bits are read as e4m3")
        is_dynamic = fields.text("quant_method", "") == "fbgemm_fp8"
        rounds = is_dynamic or fields.text("activation_scheme", "") in _ACTIVATIONS
        if asks_nothing(fields.values.get("weight_block_size")):
            return cls(None, rounds)
        return cls(block_of(fields, "weight_block_size"), rounds)

    @property
    def name(self) -> str:
        return "fp8"

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        scales = next((name for name in _SCALES if name in parts), _SCALES[-1])
        return described(tensor, parts, scales, self.block, self.float_activations)
