"""Methods of `aioserve quantize` that need no calibration: the formats of compressed-tensors.

Scales are rounded to the dtype of the file first, and then weights with these scales, which keeps
the error of weights smallest. Scales of bfloat16 weights are bfloat16, the dtype in which all
programs use them; others are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aioserve.errors import ConfigError
from aioserve.models.quantization.method import RoundingMethod, Shapes, check_groups
from aioserve.models.quantization.packing import e4m3_bits, e4m3_scales, packed
from aioserve.models.quantization.rounding import nearest_integers, quotients, round_to_integers
from aioserve.models.stored import Floats, IntegerForm

__all__ = ["GROUP_SIZES", "METHODS", "Compressed", "chosen_group_size", "method_named"]

GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale: sizes that other engines' kernels take, too."""
DEFAULT_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Compressed(RoundingMethod):
    """Method of compressed-tensors."""

    name: str
    bits: int
    kind: str
    """Kind of numbers: "int", or "float" for E4M3."""
    packed: bool
    """True if integers are packed in words of 32 bits."""
    grouped: bool
    """True if `group_size` inputs share a scale; False: all inputs of an output do."""
    rounds_activations: bool
    """True if the config asks engines to round each token's activations, too."""
    group_size: int = 0

    @property
    def format(self) -> str:
        """Name of its format in compressed-tensors."""
        if self.kind == "float":
            return "float-quantized"
        return "pack-quantized" if self.packed else "int-quantized"

    def config(self, ignored: list[str]) -> dict[str, Any]:
        strategy = "group" if self.grouped else "channel"
        weights = self._arguments(strategy, self.group_size or None, dynamic=False)
        activations = self._arguments("token", None, dynamic=True)
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations if self.rounds_activations else None,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.format,
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def check(self, module: str, rows: int, columns: int) -> None:
        if self.grouped:
            check_groups(self.group_size, module, columns)

    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        groups = columns // self.group_size if self.grouped else 1
        parts: Shapes = {"weight_scale": (scales, (rows, groups))}
        if self.packed:
            parts["weight_packed"] = "I32", (rows, -(-columns * self.bits // 32))
            parts["weight_shape"] = "I64", (2,)
        else:
            dtype = "F8_E4M3" if self.kind == "float" else "I8"
            parts["weight"] = dtype, (rows, columns)
        return parts

    def of_all_rows(self, rows: int, columns: int) -> dict[str, np.ndarray]:
        return {"weight_shape": np.array([rows, columns], "<i8")} if self.packed else {}

    def encoded(self, weight: Floats, scales: str) -> dict[str, np.ndarray]:
        if self.kind == "float":
            return self._floats(weight, scales)
        form = IntegerForm(self.bits, self.group_size or weight.shape[1], False)
        stored, exact = _stored(round_to_integers(weight, form).scales, scales)
        values = nearest_integers(weight, exact, form)
        if not self.packed:
            return {"weight": values, "weight_scale": stored}
        middle = 1 << (self.bits - 1)
        numbers = (values.astype(np.int16) + middle).astype(np.uint8)
        return {"weight_packed": packed(numbers, self.bits), "weight_scale": stored}

    def _floats(self, weight: Floats, scales: str) -> dict[str, np.ndarray]:
        stored, exact = _stored(e4m3_scales(weight), scales)
        return {"weight": e4m3_bits(quotients(weight, exact)), "weight_scale": stored}

    def _arguments(self, strategy: str, group_size: int | None, *, dynamic: bool) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": True,
            "strategy": strategy,
            "group_size": group_size,
            "dynamic": dynamic,
            "actorder": None,
            "block_structure": None,
            "observer": None if dynamic else "minmax",
            "observer_kwargs": {},
        }


METHODS: Mapping[str, Compressed] = {
    one.name: one
    for one in (
        Compressed("int8", 8, "int", packed=True, grouped=False, rounds_activations=False),
        Compressed("w8a8", 8, "int", packed=False, grouped=False, rounds_activations=True),
        Compressed("w4a16", 4, "int", packed=True, grouped=True, rounds_activations=False),
        Compressed("fp8", 8, "float", packed=False, grouped=False, rounds_activations=True),
    )
}


def method_named(name: str, group_size: int | None) -> Compressed:
    """Return a method, with groups of `group_size`, or 32, if it has groups.

    Raises `ConfigError` for an unknown method, and for a `group_size` that it does not take."""
    if name not in METHODS:
        raise ConfigError(
            f"method must be {', '.join(METHODS)}, got {name!r}", argument="method", value=name
        )
    method = METHODS[name]
    if not method.grouped:
        if group_size is None:
            return method
        raise ConfigError(
            f"group_size must be left out with method {name}: each output has one scale",
            argument="group_size",
            value=group_size,
        )
    return replace(method, group_size=chosen_group_size(group_size, DEFAULT_GROUP_SIZE))


def chosen_group_size(given: int | None, default: int) -> int:
    """Return the size given, or `default`. Raises `ConfigError` unless it is in `GROUP_SIZES`."""
    size = default if given is None else given
    if size not in GROUP_SIZES:
        raise ConfigError(
            f"group_size must be {', '.join(map(str, GROUP_SIZES))}, got {size}",
            argument="group_size",
            value=size,
        )
    return size


def _stored(scales: Floats, dtype: str) -> tuple[np.ndarray, Floats]:
    """Round scales to a file's dtype. Returns the file's array and the same numbers in float32."""
    if dtype != "BF16":
        return scales, scales
    bits = np.ascontiguousarray(scales).view(np.uint32)
    half = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return half, (half.astype(np.uint32) << 16).view(np.float32)
