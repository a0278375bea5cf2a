"""AWQ's checkpoints ("gemm"): 4-bit integers and zero points, with scales of groups of inputs.

Words pack integers and zero points along the outputs, in an order of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.scheme import (
    FLOATS,
    Parts,
    Scheme,
    centred,
    check_group_size,
    form_of,
    grouped,
    num_groups,
)
from aioserve.models.stored import Format, IntegerForm, StoredLinear, StoredTensor
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["PLACES", "Awq"]

_LAYOUTS = {"version": "gemm", "checkpoint_format": "gemm", "backend": "autoawq"}
"""Fields that tell the layout of words, and their only supported value. Programs differ in them."""
_IN_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word, in groups of four bits from the lowest, of each of eight outputs."""


@dataclass(frozen=True, slots=True)
class Awq(Scheme, Format):
    """AWQ configuration, which is also the format of its weights."""

    group_size: int
    """Number of inputs in a group; -1: all."""
    has_zeros: bool

    precision = "int4"
    unread: ClassVar[re.Pattern[str]] = re.compile(r"qzeros")
    least_rows = 512

    @classmethod
    def read(cls, fields: Fields) -> Awq:
        """Read `quantization_config`. Raises `UnsupportedModelError` and `ModelError`."""
        name = "bits" if fields.has("bits") else "w_bit"
        if fields.integer(name, 4) != 4:
            fields.unsupported(name, "AWQ is read with 4 bits")
        for name, read in _LAYOUTS.items():
            if fields.text(name, read).lower() != read:
                fields.unsupported(name, "AWQ is read in AutoAWQ's layout gemm")
        name = "group_size" if fields.has("group_size") else "q_group_size"
        group_size = fields.integer(name, 128, least=-1)
        if group_size == 0:
            fields.unsupported(name, "a group has at least one input")
        check_group_size(fields, name, group_size)
        return cls(group_size, fields.flag("zero_point", True))

    @property
    def name(self) -> str:
        return f"awq-int4-g{self.group_size}"

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        rows, columns = tensor.rows, tensor.columns
        if rows % _IN_WORD:
            parts.refuse(f"{rows} outputs of 4 bits fill no whole words")
        size = columns if self.group_size == -1 else self.group_size
        groups, words = num_groups(columns, size), rows // _IN_WORD
        read = {
            "qweight": parts.take("qweight", ("I32",), (columns, words)),
            "scales": parts.take("scales", FLOATS, (groups, rows)),
        }
        if self.has_zeros:
            read["qzeros"] = parts.take("qzeros", ("I32",), (groups, words))
        return StoredLinear(self, read, rows, columns, size)

    def integers(self, stored: StoredLinear) -> IntegerForm:
        scales = stored.parts["scales"]
        return form_of(4, stored.group_size, stored.in_features, self.has_zeros, scales)

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightIntegers:
        values = _numbers(stored.parts["qweight"], first, end)
        scales = stored.parts["scales"].read_float_columns(first, end).T
        zeros = _numbers(stored.parts["qzeros"], first, end) if self.has_zeros else None
        return grouped(values, scales, zeros, stored.group_size, 4)


def _numbers(part: StoredTensor, first: int, end: int) -> np.ndarray:
    """Unpack outputs `first` to `end`, centred at zero: int8 [outputs, rows of the part]."""
    from_word, to_word = first // _IN_WORD, -(-end // _IN_WORD)
    words = part.read_columns(from_word, to_word).view(np.uint32)
    numbers = np.empty((words.shape[1] * _IN_WORD, len(words)), np.uint8)
    for output, place in enumerate(PLACES):
        numbers[output::_IN_WORD] = ((words >> np.uint32(4 * place)) & np.uint32(15)).T
    start = from_word * _IN_WORD
    return centred(numbers[first - start : end - start], 4)
