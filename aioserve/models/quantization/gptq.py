"""GPTQ's checkpoints: integers of 2, 3, 4 or 8 bits in words along the inputs.

Groups of inputs have scales and zero points. `g_idx`, if present, has the group of each input.

The first version of the format stores zero points minus 1, modulo the number of values; the second
stores them unchanged. A symmetric method always has its zero point in the middle: the file's are
ignored, because files of either version may carry the wrong label. Modules may differ in bits,
groups and symmetry, by rules on their names (GPTQModel's `dynamic`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from aioserve.errors import ModelError
from aioserve.isolation import shown
from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.packing import unpacked
from aioserve.models.quantization.scheme import (
    FLOATS,
    Parts,
    Scheme,
    centred,
    check_group_size,
    check_names,
    compiled,
    fills_groups,
    form_of,
    grouped,
    num_groups,
)
from aioserve.models.stored import Format, IntegerForm, Rows, StoredLinear

__all__ = ["Gptq", "GptqWeights"]

BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_PLAIN, _OTHERWISE = "-:", "+:"
"""Prefixes of patterns in `dynamic`: modules that match "-:" are plain.

Modules that match "+:", or a pattern without a prefix, are quantised with other settings."""
_ALIGNED = 32
"""Number of outputs whose zero points fill whole words for any number of bits."""


@dataclass(frozen=True, slots=True)
class GptqWeights(Format):
    """Format of the weights of some modules.

    Inputs are in the order of groups, or `g_idx` has the group of each input. The weight is then
    `permuted` if sorted inputs fill all groups, and `by_index` otherwise."""

    bits: int
    group_size: int
    """Number of inputs in a group; -1: all."""
    symmetric: bool
    adds_one: bool
    """True if 1 is added to stored zero points, as in the first version of the format."""
    by_index: bool = False
    permuted: bool = False

    least_rows = 512

    @classmethod
    def read(cls, fields: Fields, adds_one: bool, default: GptqWeights | None = None) -> Self:
        """Read `quantization_config`, or a rule in it, whose missing fields come from `default`.

        Raises `UnsupportedModelError` and `ModelError`."""
        bits = fields.integer("bits", None if default is None else default.bits)
        if bits not in BITS:
            fields.unsupported("bits", f"GPTQ is read with {', '.join(map(str, BITS))} bits")
        size = -1 if default is None else default.group_size
        group_size = fields.integer("group_size", size, least=-1)
        if group_size == 0:
            fields.unsupported("group_size", "a group has at least one input")
        check_group_size(fields, "group_size", group_size)
        symmetric = fields.flag("sym", True if default is None else default.symmetric)
        return cls(bits, group_size, symmetric, adds_one)

    @property
    def name(self) -> str:
        order = "-act-order" if self.permuted else "-by-index" if self.by_index else ""
        zeros = "" if self.symmetric or self.adds_one else "-v2"
        return f"gptq-int{self.bits}-g{self.group_size}{zeros}{order}"

    def described(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        rows, columns, bits = tensor.rows, tensor.columns, self.bits
        if columns * bits % 32 or rows * bits % 32:
            parts.refuse(f"{columns} inputs and {rows} outputs of {bits} bits fill no whole words")
        size = columns if self.group_size == -1 else self.group_size
        groups = num_groups(columns, size)
        read = {
            "qweight": parts.take("qweight", ("I32",), (columns * bits // 32, rows)),
            "scales": parts.take("scales", FLOATS, (groups, rows)),
        }
        if not self.symmetric:
            read["qzeros"] = parts.take("qzeros", ("I32",), (groups, rows * bits // 32))
        format_ = self
        if "g_idx" in parts:
            index = parts.take("g_idx", ("I32", "I64"), (columns,))
            groups_of_inputs = index.read()
            in_order = np.array_equal(groups_of_inputs, np.arange(columns) // size)
            if groups_of_inputs.any() and not in_order:
                if not 0 <= groups_of_inputs.min() <= groups_of_inputs.max() < groups:
                    parts.refuse(f"g_idx must name groups from 0 to {groups - 1}")
                read["g_idx"] = index
                filled = fills_groups(groups_of_inputs, size)
                format_ = replace(self, by_index=not filled, permuted=filled)
        return StoredLinear(format_, read, rows, columns, size)

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        if self.by_index:
            return None
        scales, has_zeros = stored.parts["scales"], not self.symmetric
        sizes = self.bits, stored.group_size, stored.in_features
        return form_of(*sizes, has_zeros, scales, self.permuted)

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        words = stored.parts["qweight"].read_columns(first, end)
        values = centred(unpacked(words, self.bits).T, self.bits)
        scales = stored.parts["scales"].read_float_columns(first, end).T
        zeros = None if self.symmetric else self._zeros(stored, first, end)
        index = stored.parts["g_idx"].read() if "g_idx" in stored.parts else None
        if not self.by_index or index is None:
            return grouped(values, scales, zeros, stored.group_size, self.bits, index)
        weight = values.astype(np.float32)
        if zeros is not None:
            weight -= zeros[:, index]
        return weight * scales[:, index]

    def _zeros(self, stored: StoredLinear, first: int, end: int) -> np.ndarray:
        """Read zero points, int8 [rows, groups]."""
        part, bits = stored.parts["qzeros"], self.bits
        from_row = first - first % _ALIGNED
        to_row = min(end + -end % _ALIGNED, part.shape[1] * 32 // bits)
        words = part.read_columns(from_row * bits // 32, to_row * bits // 32)
        zeros = unpacked(np.ascontiguousarray(words.T), bits)[first - from_row : end - from_row]
        return centred((zeros + self.adds_one) & np.uint8((1 << bits) - 1), bits)


@dataclass(frozen=True, slots=True)
class Gptq(Scheme):
    """GPTQ configuration of a checkpoint."""

    weights: GptqWeights
    """Format of modules that no rule matches."""
    rules: tuple[tuple[str, GptqWeights | None], ...] = ()
    """Patterns of module names, each with the format of modules; None: they must be plain.

    A pattern matches from the beginning of a name. The first rule that matches counts."""

    unread: ClassVar[re.Pattern[str]] = re.compile(r"g_idx|qzeros")

    @classmethod
    def read(cls, fields: Fields) -> Gptq:
        """Read `quantization_config`. Raises `UnsupportedModelError` and `ModelError`."""
        at = "checkpoint_format" if fields.has("checkpoint_format") else "format"
        version = fields.text(at, "gptq")
        if version not in _FORMATS:
            fields.unsupported(at, f"GPTQ is read as {' or '.join(_FORMATS)}")
        if fields.flag("is_marlin_format", False):
            fields.unsupported("is_marlin_format", f"GPTQ is read as {' or '.join(_FORMATS)}")
        words = fields.text("pack_dtype", "int32")
        if words != "int32":
            fields.unsupported("pack_dtype", "numbers are read from words of 32 bits")
        weights = GptqWeights.read(fields, version == "gptq")
        return cls(weights, _rules(fields, weights) if fields.has("dynamic") else ())

    @property
    def precision(self) -> str:
        return "int4" if self.weights.bits <= 4 else "int8"

    @property
    def name(self) -> str:
        return self.weights.name

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        fits = (found for pattern, found in self.rules if compiled(pattern).matches(parts.module))
        weights = next(fits, self.weights)
        if weights is None:
            parts.refuse("is quantised, and quantization_config.dynamic says that it isn't")
        return weights.described(tensor, parts)


def _rules(fields: Fields, weights: GptqWeights) -> tuple[tuple[str, GptqWeights | None], ...]:
    said = fields.nested("dynamic").values
    prefixes = _PLAIN, _OTHERWISE
    patterns = {key: key[len(_PLAIN) :] if key.startswith(prefixes) else key for key in said}
    check_names(said, patterns.values(), fields, "dynamic")
    rules: list[tuple[str, GptqWeights | None]] = []
    for key, pattern in patterns.items():
        found = None
        if not key.startswith(_PLAIN):
            path = f"{fields.path}dynamic[{shown(key)}]"
            if not isinstance(values := said[key], Mapping):
                raise ModelError(f"{fields.source}: {path} must be an object, got {shown(values)}")
            found = GptqWeights.read(
                Fields(values, fields.source, f"{path}."), weights.adds_one, weights
            )
        rules.append((pattern, found))
    return tuple(rules)
