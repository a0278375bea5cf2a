"""Schemes of `quantization_config`, which describe each weight by its parts in the files."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, NoReturn

import numpy as np

from aioserve.errors import ModelError, WeightsError
from aioserve.isolation import shown
from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.patterns import Pattern
from aioserve.models.stored import (
    SCALES_OF_DTYPE,
    Floats,
    IntegerForm,
    StoredLinear,
    StoredTensor,
)
from aioserve.models.weight_integers import GROUP_SIZES, WeightIntegers

__all__ = ["EXPRESSION", "Parts", "Scheme", "check_names", "compiled", "matches"]

FLOATS = ("F32", "F16", "BF16")
EXPRESSION = "re:"
"""Prefix of regular expressions among names of modules."""
MAX_NAMES = 10_000
"""Most names and patterns in one config. Each is compared with the name of each layer."""
MAX_PATTERNS = 100
"""Most patterns in one config that are not `is_simple`."""
KV_SCALES = re.compile(r"attn\.[qkv]_(scale|zero_point)$")
"""Names of tensors for a quantised KV cache, which is not supported here."""


class Parts:
    """Tensors of one module by the rest of their names: "qweight" of "model.x.qweight"."""

    def __init__(self, module: str, found: Mapping[str, StoredTensor]) -> None:
        self.module = module
        self.found: Mapping[str, StoredTensor] = found

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def take(self, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> StoredTensor:
        """Return the part `name`. Raises `WeightsError` if it is missing or has another form."""
        part = self.found.get(name)
        if part is None:
            raise WeightsError(f"the weights lack {self.module}.{name}")
        if part.dtype not in dtypes:
            raise WeightsError(
                f"{part.label} has dtype {part.dtype}, quantization_config asks for "
                f"{' or '.join(dtypes)}"
            )
        if part.shape != shape:
            raise WeightsError(
                f"{part.label} has shape {shown(list(part.shape))}, quantization_config asks for "
                f"{list(shape)}"
            )
        return part

    def refuse(self, why: str) -> NoReturn:
        raise WeightsError(f"{self.module}: {why}")


class Scheme(ABC):
    """Storage of a checkpoint's quantised weights. Its other weights are plain."""

    precision: str
    """Precision of its weights, by which sizes are planned: int4, int8 or fp8; empty where they
    become floats of the model's dtype."""
    unread: ClassVar[re.Pattern[str]]
    """Names of parts that may be present but do not affect the weights."""

    @abstractmethod
    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        """Describe a quantised weight. Raises `WeightsError`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the method in messages."""


@functools.lru_cache(MAX_NAMES)
def compiled(pattern: str) -> Pattern:
    """Compile a pattern, or return it if it was compiled before."""
    return Pattern(pattern)


def check_names(names: Collection[str], patterns: Iterable[str], fields: Fields, at: str) -> None:
    """Raise `ModelError` for more than `MAX_NAMES`, too many slow patterns, or an invalid one.

    `at` names the fields of the config that have them, for messages."""

    def check(count: int, what: str, most: int) -> None:
        if count > most:
            raise ModelError(
                f"{fields.source}: quantization_config must have at most {most} {what} in {at}"
            )

    check(len(names), "names", MAX_NAMES)
    slow = 0
    for pattern in patterns:
        try:
            slow += not compiled(pattern).is_simple
        except WeightsError as error:
            raise ModelError(f"{fields.source}: {error}") from error
        check(slow, "patterns with groups or repetitions", MAX_PATTERNS)


def matches(pattern: str, module: str) -> bool:
    """True if a name or "re:" pattern means the module, by the rules of compressed-tensors.

    A name may be the last parts of the module's name. Raises the errors of `Pattern`."""
    if pattern.startswith(EXPRESSION):
        return compiled(pattern.removeprefix(EXPRESSION)).matches(module)
    return module == pattern or module.endswith("." + pattern)


def num_groups(columns: int, group_size: int) -> int:
    return -(-columns // group_size)


def form_of(
    bits: int,
    group_size: int,
    columns: int,
    has_zeros: bool,
    scales: StoredTensor | None = None,
    permuted: bool = False,
    integer_activations: bool = False,
) -> IntegerForm:
    """Return the form of rows that `grouped` makes.

    `scales`: the stored scales; None: scales are computed, in float32."""
    return IntegerForm(
        4 if bits <= 4 else 8,
        _common_size(group_size, columns),
        has_zeros,
        "float32" if scales is None else SCALES_OF_DTYPE[scales.dtype],
        has_zeros,
        permuted=permuted,
        integer_activations=integer_activations,
    )


def fills_groups(index: np.ndarray, group_size: int) -> bool:
    """True if sorting the inputs by their groups in `index` makes every group whole."""
    return np.array_equal(np.sort(index), np.arange(len(index)) // group_size)


def check_group_size(fields: Fields, name: str, group_size: int) -> None:
    if group_size > 0 and group_size not in GROUP_SIZES and group_size % max(GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        fields.unsupported(name, f"groups have {sizes} inputs, or a multiple of the last")


def centred(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Shift unsigned numbers of `bits` bits so that their middle is zero: int8."""
    return (numbers - np.uint8(1 << (bits - 1))).view(np.int8)


def grouped(
    values: np.ndarray,
    scales: Floats,
    zeros: np.ndarray | None,
    group_size: int,
    bits: int,
    index: np.ndarray | None = None,
) -> WeightIntegers:
    """Make `WeightIntegers` of signed values, int8 [out, in].

    - group_size: one of `GROUP_SIZES`, a multiple of 128, or all inputs.
    - index: group of each input, if inputs aren't in the order of groups. All groups are full."""
    columns = values.shape[1]
    order = None
    if index is not None:
        order = np.argsort(index, kind="stable").astype(np.int32)
        values = values[:, order]
    size = _common_size(group_size, columns)
    if size < group_size:
        count = num_groups(columns, size)
        times = min(group_size // size, count)  # groups may exceed the weight
        scales = np.repeat(scales, times, axis=1)[:, :count]
        zeros = None if zeros is None else np.repeat(zeros, times, axis=1)[:, :count]
    return WeightIntegers(
        np.ascontiguousarray(values),
        np.ascontiguousarray(scales, np.float32),
        None if zeros is None else np.ascontiguousarray(zeros),
        None,
        size,
        4 if bits <= 4 else 8,
        order=order,
    )


def _common_size(group_size: int, columns: int) -> int:
    if group_size in GROUP_SIZES or group_size == columns:
        return group_size
    return max(GROUP_SIZES)
