"""Checkpoints of compressed-tensors: 4-bit or 8-bit integers, E4M3 floats, MXFP4 and MXFP8.

Integers may be packed in words. Groups of modules may have a scheme each. Scales of activations are
not read. Activations stay floats here, or each row is rounded with its own scale, which is closer
to the unquantised model. GPUs round them only if the file asks for 8-bit integers or floats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.quantization import fp8
from aioserve.models.quantization.mxfp4 import GROUP_SIZE, Mxfp4
from aioserve.models.quantization.packing import unpacked
from aioserve.models.quantization.scheme import (
    EXPRESSION,
    FLOATS,
    Parts,
    Scheme,
    centred,
    check_group_size,
    check_names,
    fills_groups,
    form_of,
    grouped,
    matches,
    num_groups,
)
from aioserve.models.stored import Format, IntegerForm, Rows, StoredLinear

__all__ = ["CompressedTensors"]

_PACKED, _INT, _FLOAT, _NAIVE, _MXFP4, _MXFP8 = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE, _MXFP4, _MXFP8)
_STRATEGIES = ("tensor", "channel", "group", "block")
_ALONE = ((), (1,), (1, 1))
"""Shapes of a scale that a whole weight shares."""
_PARTS = ("weights", "input_activations", "output_activations")
"""Fields of a group that may ask for quantisation."""
_ALL_LINEARS = "Linear"
"""Target of a group that means every linear layer: the name of torch's class."""


@dataclass(frozen=True, slots=True)
class Integers(Format):
    """Integers of a group of modules.

    They are plain ("weight"), or with `packed` in words along the inputs ("weight_packed"), with
    zero points in words along the outputs. The part "weight_g_idx" may give the group of each
    input. The weight is then `permuted` if sorted inputs fill all groups, and `by_index` otherwise.
    """

    bits: int
    packed: bool
    group_size: int
    """Number of inputs in a group; 0: each output has one scale, -1: the weight has one."""
    symmetric: bool
    by_index: bool = False
    permuted: bool = False
    integer_activations: bool = False

    @property
    def name(self) -> str:
        kind = "packed" if self.packed else "plain"
        order = "-act-order" if self.permuted else "-by-index" if self.by_index else ""
        activations = "-a8" if self.integer_activations else ""
        return f"compressed-{kind}-int{self.bits}-g{self.group_size}{order}{activations}"

    def described(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        rows, columns, bits = tensor.rows, tensor.columns, self.bits
        size = self.group_size if self.group_size > 0 else columns
        groups = num_groups(columns, size)
        if self.packed:
            words = num_groups(columns, 32 // bits)
            weight = parts.take("weight_packed", ("I32",), (rows, words))
        else:
            weight = parts.take("weight", ("I8",), (rows, columns))
        read = {
            "weight": weight,
            "scales": self._of_groups(parts, "weight_scale", FLOATS, rows, groups),
        }
        if not self.symmetric:
            zeros = parts.found.get("weight_zero_point")
            if self.packed and zeros is not None and zeros.dtype == "I32":
                shape = num_groups(rows, 32 // bits), groups
                read["zeros"] = parts.take("weight_zero_point", ("I32",), shape)
            else:
                read["zeros"] = self._of_groups(parts, "weight_zero_point", ("I8",), rows, groups)
        format_ = self
        if "weight_g_idx" in parts:
            part = parts.take("weight_g_idx", ("I32", "I64"), (columns,))
            index = part.read()
            in_order = np.array_equal(index, np.arange(columns) // size)
            if index.any() and (index != -1).any() and not in_order:
                if not 0 <= index.min() <= index.max() < groups:
                    parts.refuse(f"weight_g_idx must name groups from 0 to {groups - 1}")
                read["index"] = part
                filled = fills_groups(index, size)
                format_ = replace(self, by_index=not filled, permuted=filled)
        return StoredLinear(format_, read, rows, columns, size)

    def _of_groups(self, parts: Parts, name: str, dtypes, rows: int, groups: int):
        stored = parts.found.get(name)
        if self.group_size == -1 and stored is not None and stored.shape in _ALONE:
            return parts.take(name, dtypes, stored.shape)
        if groups == 1 and stored is not None and stored.shape == (rows,):
            return parts.take(name, dtypes, (rows,))
        return parts.take(name, dtypes, (rows, groups))

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        if self.by_index:
            return None
        scales, has_zeros = stored.parts["scales"], not self.symmetric
        sizes = self.bits, stored.group_size, stored.in_features
        return form_of(*sizes, has_zeros, scales, self.permuted, self.integer_activations)

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        count, parts = end - first, stored.parts
        values = parts["weight"].read(first, end)
        if self.packed:
            values = centred(unpacked(values.T, self.bits)[: stored.in_features].T, self.bits)

        def of_groups(name: str) -> np.ndarray:
            part = parts[name]
            read = part.read_floats if part.dtype in FLOATS else part.read
            if self.group_size == -1 and part.shape in _ALONE:
                return np.repeat(read().reshape(1, 1), count, axis=0)
            return read(first, end).reshape(count, -1)

        scales = of_groups("scales")
        zeros = None
        if "zeros" in parts:
            zeros = (
                self._packed_zeros(stored, first, end)
                if parts["zeros"].dtype == "I32"
                else of_groups("zeros")
            )
        index = parts["index"].read() if "index" in parts else None
        if not self.by_index or index is None:
            return grouped(values, scales, zeros, stored.group_size, self.bits, index)
        weight = values.astype(np.float32)
        if zeros is not None:
            weight -= zeros[:, index]
        return weight * scales[:, index]

    def _packed_zeros(self, stored: StoredLinear, first: int, end: int) -> np.ndarray:
        in_word = 32 // self.bits
        words = stored.parts["zeros"].read(first // in_word, num_groups(end, in_word))
        start = first - first % in_word
        numbers = unpacked(words, self.bits)[first - start : end - start]
        return centred(numbers, self.bits)


@dataclass(frozen=True, slots=True)
class Floats8:
    """E4M3 floats of a group of modules."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: each output has a scale, or all share one."""
    float_activations: bool

    def described(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        sizes = self.block, self.float_activations
        return fp8.described(tensor, parts, "weight_scale", *sizes)


@dataclass(frozen=True, slots=True)
class CompressedTensors(Scheme):
    """Schemes of groups of modules, in the order of the file."""

    groups: tuple[tuple[tuple[str, ...], Integers | Floats8 | Mxfp4], ...]
    """Targets of each group, and the format of their weights."""
    ignored: tuple[str, ...]

    unread: ClassVar[re.Pattern[str]] = re.compile(
        r"weight_shape|weight_g_idx|weight_zero_point|(input|output)_(scale|zero_point|global_scale)"
        r"|[kqv]_(scale|zero_point)"
    )

    @classmethod
    def read(cls, fields: Fields) -> CompressedTensors | None:
        """Read `quantization_config`; None if no group of weights is quantised.

        Raises `UnsupportedModelError` and `ModelError`."""
        for name in ("sparsity_config", "transform_config"):
            value = fields.values.get(name)
            if isinstance(value, Mapping) and not _is_empty(value):
                fields.unsupported(name, "only weights that are quantised alone can be loaded")
        whole = fields.text("format", "dense")
        if asks_nothing(fields.values.get("config_groups")):
            return None
        said = fields.nested("config_groups")
        groups = [
            (_targets(one), _group(one, one.text("format", whole)))
            for one in map(said.nested, said.values)
            if not asks_nothing([one.values.get(name) for name in _PARTS])
        ]
        if not groups:
            return None
        ignored = _names(fields, "ignore")
        names = [*ignored, *(target for targets, _ in groups for target in targets)]
        patterns = [name.removeprefix(EXPRESSION) for name in names if name.startswith(EXPRESSION)]
        check_names(names, patterns, fields, "ignore and targets")
        return cls(tuple(groups), ignored)

    @property
    def precision(self) -> str:
        found = self.groups[0][1]
        if isinstance(found, Integers):
            return "int4" if found.bits <= 4 else "int8"
        return "fp8" if isinstance(found, Floats8) else "int4"

    @property
    def name(self) -> str:
        return "compressed-tensors"

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        module = parts.module
        if any(matches(pattern, module) for pattern in self.ignored):
            parts.refuse("is among those that quantization_config says aren't quantised, and is")
        meant = [
            (_certainty(target), kind)
            for targets, kind in self.groups
            for target in targets
            if target == _ALL_LINEARS or matches(target, module)
        ]
        if not meant:
            parts.refuse("is quantised, and no group of quantization_config is for it")
        return max(meant, key=lambda found: found[0])[1].described(tensor, parts)


def _is_empty(said: Mapping[str, object]) -> bool:
    """True if a config of sparsity or of transforms changes nothing."""
    return said.get("format") == "dense" or all(
        value is None or (name == "config_groups" and not value) for name, value in said.items()
    )


def _certainty(target: str) -> int:
    """Rank of a target that matches: a name above a pattern above a class of layers.

    Among targets of the same rank, the first one counts."""
    return 0 if target == _ALL_LINEARS else 1 if target.startswith("re:") else 2


def _targets(group: Fields) -> tuple[str, ...]:
    return _names(group, "targets") or (_ALL_LINEARS,)


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.values.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        fields.invalid(name, "a list of strings")
    return tuple(value)


def _group(group: Fields, stored_as: str) -> Integers | Floats8 | Mxfp4:
    weights = group.nested("weights")
    if stored_as not in _FORMATS:
        group.unsupported("format", f"{stored_as} isn't read; {', '.join(_FORMATS)} are")
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    weights = weights.without_nothing("group_size")
    sizes = {None: "tensor", -1: "channel"}
    strategy = weights.text("strategy", sizes.get(weights.values.get("group_size"), "group"))
    if strategy not in _STRATEGIES:
        weights.unsupported("strategy", f"scales are read by {', '.join(_STRATEGIES)}")
    if stored_as in (_MXFP4, _MXFP8):
        size, symmetric = weights.integer("group_size", GROUP_SIZE), weights.flag("symmetric", True)
        meant = 4 if stored_as == _MXFP4 else 8, "float", "group", GROUP_SIZE, True
        if (bits, kind, strategy, size, symmetric) != meant:
            weights.unsupported(
                "num_bits", f"{stored_as} has symmetric floats in groups of {GROUP_SIZE}"
            )
        if stored_as == _MXFP4:
            return Mxfp4()
        return Floats8((1, GROUP_SIZE), _rounds_activations(group, "float"))
    if kind == "float":
        if bits != 8 or strategy == "group" or stored_as == _PACKED:
            weights.unsupported(
                "num_bits", "floats have 8 bits, and scales by tensor, channel, block"
            )
        block = fp8.block_of(weights, "block_structure") if strategy == "block" else None
        return Floats8(block, _rounds_activations(group, "float"))
    if bits not in (4, 8):
        weights.unsupported("num_bits", "integers have 4 or 8 bits")
    if kind != "int" or strategy == "block" or stored_as == _FLOAT:
        weights.unsupported("type", "integers have scales by tensor, channel, group")
    size = {"tensor": -1, "channel": 0}.get(strategy)
    if size is None:
        size = weights.integer("group_size")
        check_group_size(weights, "group_size", size)
    symmetric, rounds = weights.flag("symmetric", True), _rounds_activations(group, "int")
    return Integers(bits, stored_as == _PACKED, size, symmetric, integer_activations=rounds)


def _rounds_activations(group: Fields, kind: str) -> bool:
    """True if the file asks for 8-bit activations of this kind, "int" or "float"."""
    if not group.has("input_activations"):
        return False
    said = group.nested("input_activations")
    return said.integer("num_bits", 8) == 8 and said.text("type", "int") == kind
