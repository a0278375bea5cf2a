"""Checkpoints of bitsandbytes: 8-bit integers, or 4-bit codes.

Integers have a scale for each output (LLM.int8). Codes choose from a table in the file (NF4 and
FP4), and have a scale for each block. Blocks run through the numbers of the whole weight, across
the ends of rows. The scales of blocks may be 8-bit codes themselves ("double quantisation"), in
blocks with scales of their own.
Sources: Dettmers et al., "LLM.int8()", 2022, and "QLoRA", 2023.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from aioserve.isolation import shown
from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.scheme import Parts, Scheme, form_of, grouped, num_groups
from aioserve.models.stored import (
    CodeForm,
    Floats,
    Format,
    IntegerForm,
    StoredLinear,
    StoredTensor,
)
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["BitsAndBytes"]

_STATE = "weight.quant_state.bitsandbytes__"
"""Beginning of the name of a tensor that holds JSON about a 4-bit weight."""
_MOST_STATE_BYTES = 4096
"""Most bytes of this JSON, which usually has about 150."""
_STORAGE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
"""Dtypes in which files may store the bytes of 4-bit weights, with the bytes of a number."""
_ROWS = 0
"""The only `weight_format` that keeps the order of the weight."""


class _State(msgspec.Struct, frozen=True):
    """Fields that are read from the JSON about a 4-bit weight."""

    blocksize: Annotated[int, msgspec.Meta(ge=16, le=1 << 16)]
    shape: Annotated[list[int], msgspec.Meta(min_length=2, max_length=2)]
    nested_blocksize: Annotated[int, msgspec.Meta(ge=16, le=1 << 16)] | None = None
    nested_offset: float = 0.0


_STATE_JSON = msgspec.json.Decoder(_State)


@dataclass(frozen=True, slots=True)
class Integers8(Format):
    """Part "weight" of int8, and part "scales" with the largest magnitude of each output."""

    @property
    def name(self) -> str:
        return "bitsandbytes-int8"

    def integers(self, stored: StoredLinear) -> IntegerForm:
        return form_of(8, stored.in_features, stored.in_features, False)

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightIntegers:
        values = stored.parts["weight"].read(first, end)
        scales = stored.parts["scales"].read_floats(first, end) / np.float32(127)
        return grouped(values, scales[:, None], None, stored.in_features, 8)


@dataclass(frozen=True, slots=True)
class Codes4(Format):
    """Format of 4-bit codes, in the following parts.

    - weight: two codes in each byte, the first in the high bits.
    - table: the 16 numbers that codes stand for.
    - scales: a scale for every `block` numbers.
    - scale_table and outer_scales: with `scale_block`, scales are 8-bit codes of numbers in
      "scale_table". A scale is its number times one of "outer_scales", plus `offset`. Each outer
      scale is for `scale_block` scales.
    """

    kind: str
    block: int
    scale_block: int = 0
    offset: float = 0.0
    table: tuple[float, ...] = ()
    """Contents of the part "table"."""

    @property
    def name(self) -> str:
        twice = f"-double{self.scale_block}+{self.offset!r}" if self.scale_block else ""
        return f"bitsandbytes-{self.kind}-b{self.block}{twice}"

    def integers(self, stored: StoredLinear) -> None:
        return None

    def codes(self, stored: StoredLinear) -> CodeForm | None:
        if stored.in_features % self.block:
            return None  # blocks end within rows
        return CodeForm(self.block, self.table)

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightCodes | Floats:
        columns, parts = stored.in_features, stored.parts
        start, stop = first * columns, end * columns
        packed = parts["weight"].read_bytes(start // 2, num_groups(stop, 2) - start // 2)
        codes = np.stack((packed >> 4, packed & 15), axis=1).reshape(-1)[start % 2 :]
        codes = codes[: stop - start].reshape(end - first, columns).astype(np.uint8, copy=False)
        from_block = start // self.block
        scales = self._scales(parts, from_block, num_groups(stop, self.block))
        table = np.array(self.table, np.float32)
        if columns % self.block == 0:
            scales = scales.astype(np.float32, copy=False).reshape(end - first, -1)
            return WeightCodes(codes, table, scales, self.block)
        each = np.repeat(scales, self.block)[start - from_block * self.block :]
        return table[codes] * each[: stop - start].reshape(codes.shape)

    def _scales(self, parts: Mapping[str, StoredTensor], first: int, end: int) -> Floats:
        if not self.scale_block:
            return parts["scales"].read(first, end)
        numbers = parts["scale_table"].read()[parts["scales"].read(first, end)]
        start = first // self.scale_block
        outer = parts["outer_scales"].read(start, num_groups(end, self.scale_block))
        each = np.repeat(outer, self.scale_block)[first - start * self.scale_block :]
        return numbers * each[: end - first] + np.float32(self.offset)


@dataclass(frozen=True, slots=True)
class BitsAndBytes(Scheme):
    """Checkpoint of bitsandbytes. The parts of each weight show which of the two formats it has."""

    precision: str

    unread: ClassVar[re.Pattern[str]] = re.compile(r"weight_format|weight\.quant_state\..*")

    @classmethod
    def read(cls, fields: Fields) -> BitsAndBytes | None:
        """Read `quantization_config`; None if it asks for neither 4 nor 8 bits.

        Raises `UnsupportedModelError` and `ModelError`."""
        four, eight = fields.flag("load_in_4bit", False), fields.flag("load_in_8bit", False)
        if four and eight:
            fields.unsupported("load_in_4bit", "it or load_in_8bit must be true, not both")
        if not four and not eight:
            return None
        return cls("int4" if four else "int8")

    @property
    def name(self) -> str:
        return "bitsandbytes"

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        states = sorted(name for name in parts.found if name.startswith(_STATE))
        if len(states) > 1:
            parts.refuse(f"there must be one quant_state of a weight, got {', '.join(states)}")
        if states:
            return _codes(tensor, parts, states[0])
        rows, columns = tensor.rows, tensor.columns
        read = {
            "weight": parts.take("weight", ("I8",), (rows, columns)),
            "scales": parts.take("SCB", ("F32",), (rows,)),
        }
        if "weight_format" in parts:
            order = int(parts.take("weight_format", ("U8",), ()).read()[0])
            if order != _ROWS:
                parts.refuse(f"weight_format must be {_ROWS}, rows in order, got {order}")
        return StoredLinear(Integers8(), read, rows, columns, columns)


def _codes(tensor: Tensor, parts: Parts, state: str) -> StoredLinear:
    rows, columns = tensor.rows, tensor.columns
    said = _read_state(parts, state)
    if said.shape != [rows, columns]:
        parts.refuse(
            f"{state} tells of shape {shown(said.shape)}, config.json of {[rows, columns]}"
        )
    weight = parts.found.get("weight")
    size = _STORAGE_BYTES.get("" if weight is None else weight.dtype, 1)
    num_bytes = num_groups(rows * columns, 2)
    if num_bytes % size:
        parts.refuse(f"{num_bytes} bytes of codes fill no whole numbers of {size} bytes")
    blocks = num_groups(rows * columns, said.blocksize)
    read = {
        "weight": parts.take("weight", _STORAGE_BYTES, (num_bytes // size, 1)),
        "table": parts.take("weight.quant_map", ("F32",), (16,)),
    }
    kind = state.removeprefix(_STATE)
    numbers = read["table"].read()
    if not np.isfinite(numbers).all():
        parts.refuse(f"weight.quant_map must hold finite numbers, got {numbers.tolist()}")
    table = tuple(numbers.tolist())
    if said.nested_blocksize is None:
        read["scales"] = parts.take("weight.absmax", ("F32",), (blocks,))
        return StoredLinear(Codes4(kind, said.blocksize, table=table), read, rows, columns)
    outer = num_groups(blocks, said.nested_blocksize)
    read["scales"] = parts.take("weight.absmax", ("U8",), (blocks,))
    read["scale_table"] = parts.take("weight.nested_quant_map", ("F32",), (256,))
    read["outer_scales"] = parts.take("weight.nested_absmax", ("F32",), (outer,))
    nested = said.nested_blocksize, said.nested_offset
    format_ = Codes4(kind, said.blocksize, *nested, table)
    return StoredLinear(format_, read, rows, columns)


def _read_state(parts: Parts, name: str) -> _State:
    kind, part = name.removeprefix(_STATE), parts.found[name]
    if kind not in ("nf4", "fp4"):
        parts.refuse(f"codes of 4 bits are read of nf4 and fp4, got {shown(kind)}")
    if part.num_bytes > _MOST_STATE_BYTES:
        parts.refuse(f"{name} must have at most {_MOST_STATE_BYTES} bytes, has {part.num_bytes}")
    part = parts.take(name, ("U8",), (part.num_bytes,))
    try:
        return _STATE_JSON.decode(part.read().tobytes())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        parts.refuse(f"{name} can't be read: {error}")
