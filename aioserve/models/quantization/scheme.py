"""What a checkpoint's `quantization_config` says: how the parts of each weight are found."""

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
from aioserve.models.grouped import GROUP_SIZES, GroupedIntegers
from aioserve.models.quantization.patterns import Pattern
from aioserve.models.stored import (
    SCALES_OF_DTYPE,
    Floats,
    IntegerForm,
    StoredLinear,
    StoredTensor,
)

__all__ = ["EXPRESSION", "Parts", "Scheme", "check_names", "compiled", "matches"]

FLOATS = ("F32", "F16", "BF16")
EXPRESSION = "re:"
"""What patterns begin with that aren't names."""
MAX_NAMES = 10_000
"""Most names and patterns in one config: each is compared with the name of each layer."""
MAX_PATTERNS = 100
"""Most of them that aren't simple."""
KV_SCALES = re.compile(r"attn\.[qkv]_(scale|zero_point)$")
"""Tensors for a KV cache of fewer bits, which isn't what keys and values are kept in here."""


class Parts:
    """The tensors of one module by the rest of their names: "qweight" of "model.x.qweight"."""

    def __init__(self, module: str, found: Mapping[str, StoredTensor]) -> None:
        self.module = module
        self.found: Mapping[str, StoredTensor] = found

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def take(self, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> StoredTensor:
        """The part of that name. Raises `WeightsError` for another dtype or shape, or none."""
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
    """How a checkpoint stores the weights that it quantises; those that it doesn't are plain."""

    precision: str
    """Precision of its weights, by which sizes are planned: int4, int8 or fp8."""
    unread: ClassVar[re.Pattern[str]]
    """Names of parts that may be there, and that the numbers of weights don't depend on."""

    @abstractmethod
    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        """Description of a weight that isn't plain. Raises `WeightsError`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the method in messages."""


@functools.lru_cache(MAX_NAMES)
def compiled(pattern: str) -> Pattern:
    """The pattern, each made once."""
    return Pattern(pattern)


def check_names(names: Collection[str], patterns: Iterable[str], fields: Fields, at: str) -> None:
    """Raise `ModelError` for more names, or patterns among them, than may be compared with the name
    of each layer, and for a pattern that isn't known. `at` says where the config has them."""

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
    """Whether a name, or a pattern behind "re:", stands for the module, as compressed-tensors has
    it; or the last part of the module's name. Raises as `Pattern` does."""
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
    """The form of `grouped`, whose scales are stored so, or computed."""
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
    """Whether inputs, whose groups `index` has, fill all groups: sorting makes these whole."""
    return np.array_equal(np.sort(index), np.arange(len(index)) // group_size)


def check_group_size(fields: Fields, name: str, group_size: int) -> None:
    if group_size > 0 and group_size not in GROUP_SIZES and group_size % max(GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        fields.unsupported(name, f"groups have {sizes} inputs, or a multiple of the last")


def centred(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers of so many bits with their middle at zero: int8."""
    return (numbers - np.uint8(1 << (bits - 1))).view(np.int8)


def grouped(
    values: np.ndarray,
    scales: Floats,
    zeros: np.ndarray | None,
    group_size: int,
    bits: int,
    index: np.ndarray | None = None,
) -> GroupedIntegers:
    """Signed values, int8, in groups of any size that is a multiple of 128, or one of
    `GROUP_SIZES`, or all inputs. `index`: the groups of inputs, if these aren't in their order;
    they fill them."""
    columns = values.shape[1]
    order = None
    if index is not None:
        order = np.argsort(index, kind="stable").astype(np.int32)
        values = values[:, order]
    size = _common_size(group_size, columns)
    if size < group_size:
        count = num_groups(columns, size)
        times = min(group_size // size, count)  # files say any group size
        scales = np.repeat(scales, times, axis=1)[:, :count]
        zeros = None if zeros is None else np.repeat(zeros, times, axis=1)[:, :count]
    return GroupedIntegers(
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
