"""Files of GPTQ and AWQ: 4-bit integers in words of 32 bits, scales and zero points of groups.

Scales are float16, which programs expect of these formats. For models in bfloat16, they are rounded
to bfloat16 first, so that programs that compute in either dtype read the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioserve.errors import ConfigError, WeightsError
from aioserve.models.quantization.awq import PLACES
from aioserve.models.quantization.method import Method, RoundingMethod, Shapes, check_groups
from aioserve.models.quantization.packing import packed
from aioserve.models.quantization.rounding import quotients
from aioserve.models.stored import Floats, StoredLinear

__all__ = ["AwqStoring", "GptqStoring", "short_scales"]

BITS = 4
IN_WORD = 8
_MIDDLE = 8
_LARGEST = 15
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Candidates for the share of a group's range that is kept.

Numbers beyond it are cut off, and the others get finer steps. The candidate with the least squared
error is taken, or the first of equal ones."""


@dataclass(frozen=True)
class GptqStoring(Method):
    """GPTQ's files: symmetric integers, with inputs in their own order."""

    group_size: int

    name = "gptq"

    def config(self, ignored: list[str]) -> dict[str, Any]:
        # The format has no list of plain modules, so each gets a rule.
        left_out = {f"-:^{re.escape(one)}$": {} for one in ignored if one != "lm_head"}
        return {
            "quant_method": "gptq",
            "bits": BITS,
            "group_size": self.group_size,
            "sym": True,
            "desc_act": False,
            "static_groups": True,
            "damp_percent": 0.01,
            "true_sequential": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            **({"dynamic": left_out} if left_out else {}),
        }

    def check(self, module: str, rows: int, columns: int) -> None:
        _check_words(self.name, self.group_size, module, rows, columns)

    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        groups = columns // self.group_size
        return {
            "qweight": ("I32", (columns // IN_WORD, rows)),
            "qzeros": ("I32", (groups, rows // IN_WORD)),
            "scales": ("F16", (groups, rows)),
            "g_idx": ("I32", (columns,)),
        }

    def stored(self, values: np.ndarray, scales: Floats) -> dict[str, np.ndarray]:
        """Make the parts of a weight: values int8 [out, in] within [-8, 7], scales [out, groups].

        `scales` must come from `short_scales`."""
        rows, columns = values.shape
        groups = scales.shape[1]
        numbers = (values + np.int8(_MIDDLE)).view(np.uint8)
        # The first version of the format stores zero points minus 1.
        zeros = np.full((groups, rows), _MIDDLE - 1, np.uint8)
        return {
            "qweight": np.ascontiguousarray(packed(numbers, BITS).T),
            "qzeros": packed(zeros, BITS),
            "scales": np.ascontiguousarray(scales.T.astype(np.float16)),
            "g_idx": (np.arange(columns) // self.group_size).astype(np.int32),
        }


@dataclass(frozen=True)
class AwqStoring(RoundingMethod):
    """AWQ's files in the layout "gemm": integers with zero points."""

    group_size: int

    name = "awq"

    def config(self, ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": self.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ignored,
        }

    def check(self, module: str, rows: int, columns: int) -> None:
        _check_words(self.name, self.group_size, module, rows, columns)

    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        groups, words = columns // self.group_size, rows // IN_WORD
        return {
            "qweight": ("I32", (columns, words)),
            "qzeros": ("I32", (groups, words)),
            "scales": ("F16", (groups, rows)),
        }

    def blocks(self, stored: StoredLinear) -> Iterator[tuple[int, int]]:
        yield 0, stored.out_features  # rows are the last axis of the parts

    def encoded(self, weight: Floats, scales: str) -> dict[str, np.ndarray]:
        values, zeros, short = self._rounded(weight, scales, _SHRINKS)
        return {
            "qweight": _awq_words(values),
            "qzeros": _awq_words(zeros),
            "scales": np.ascontiguousarray(short.T.astype(np.float16)),
        }

    def once_rounded(self, weight: Floats, scales: str) -> Floats:
        """Round a weight whose groups keep their whole range, and dequantise it again."""
        values, zeros, short = self._rounded(weight, scales, _SHRINKS[:1])
        columns = weight.shape[1]
        each = [np.repeat(part, self.group_size, axis=1)[:, :columns] for part in (zeros, short)]
        return (values.astype(np.float32) - each[0]) * each[1]

    def _rounded(
        self, weight: Floats, scales: str, shrinks: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray, Floats]:
        """Return values, uint8 [out, in], with zero points and scales, both [out, groups].

        Zero points are uint8, scales float32."""
        if not np.isfinite(weight).all():
            raise WeightsError("NaN and infinity can't be quantised")
        groups = np.ascontiguousarray(weight).reshape(len(weight), -1, self.group_size)
        least = np.minimum(groups.min(axis=2, keepdims=True), 0)
        most = np.maximum(groups.max(axis=2, keepdims=True), 0)
        best_error = np.full_like(least, np.inf)
        best_values = np.zeros(groups.shape, np.float32)
        best_zeros, best_scales = np.zeros_like(least), np.zeros_like(least)
        for shrink in map(np.float32, shrinks):
            each = short_scales((most - least) * (shrink / np.float32(_LARGEST)), scales)
            zeros = np.clip(np.rint(quotients(-least * shrink, each)), 0, _LARGEST)
            values = np.clip(np.rint(quotients(groups, each)) + zeros, 0, _LARGEST)
            error = np.square((values - zeros) * each - groups).sum(axis=2, keepdims=True)
            better = error < best_error
            np.copyto(best_error, error, where=better)
            np.copyto(best_values, values, where=better)
            np.copyto(best_zeros, zeros, where=better)
            np.copyto(best_scales, each, where=better)
        values = best_values.reshape(weight.shape).astype(np.uint8)
        return values, best_zeros[:, :, 0].astype(np.uint8), best_scales[:, :, 0]


def short_scales(scales: Floats, precision: str) -> Floats:
    """Round scales to the files' precision, in float32. Raises `WeightsError` beyond float16."""
    if precision == "BF16":
        bits = np.ascontiguousarray(scales).view(np.uint32)
        bits = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        scales = bits.view(np.float32)
    with np.errstate(over="ignore"):
        short = scales.astype(np.float16)
    if not np.isfinite(short).all():
        raise WeightsError("its scales are beyond 65504, the most that float16 holds")
    return short.astype(np.float32)


def _awq_words(numbers: np.ndarray) -> np.ndarray:
    """Pack numbers, uint8 [out, n], into AWQ's words, int32 [n, out / 8]."""
    count, width = numbers.shape[1], len(numbers)
    placed = np.empty((count, width // IN_WORD, IN_WORD), np.uint8)
    placed[:, :, PLACES] = numbers.T.reshape(placed.shape)
    return packed(placed.reshape(count, width), BITS)


def _check_words(name: str, group_size: int, module: str, rows: int, columns: int) -> None:
    check_groups(group_size, module, columns)
    if rows % IN_WORD:
        raise ConfigError(
            f"model must have a multiple of {IN_WORD} outputs in every linear layer for {name}, "
            f"and {module} has {rows}",
            argument="model",
        )
