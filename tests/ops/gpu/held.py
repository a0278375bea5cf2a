"""Layers of small numbers in the form that GPUs hold, and their exact results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aioserve.formats.weights import CUDA, ComputedFormats, PackedLinear
from aioserve.models.packed_decoding import PackedDecoding
from aioserve.models.quantization.packing import E4M3
from aioserve.models.stored import (
    CodeForm,
    Floats,
    Format,
    IntegerForm,
    Rows,
    StoredLinear,
    StoredTensor,
)
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import Scales, WeightIntegers

__all__ = [
    "NF4",
    "InMemory",
    "Weight",
    "exact",
    "held",
    "random_codes",
    "random_integers",
    "stored",
]

Weight = WeightIntegers | WeightCodes | Floats


PARTS = {"weight": StoredTensor(Path("memory"), "weight", -1, 0, 0, "U8", (1, 1))}


@dataclass(frozen=True, eq=False)
class InMemory(Format):
    """Format of a weight in memory."""

    weight: Weight
    form: IntegerForm | CodeForm | None

    @property
    def name(self) -> str:
        return "memory"

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        return self.form if isinstance(self.form, IntegerForm) else None

    def codes(self, stored: StoredLinear) -> CodeForm | None:
        return self.form if isinstance(self.form, CodeForm) else None

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        weight = self.weight
        if isinstance(weight, WeightIntegers):
            return weight.rows(first, end)
        if isinstance(weight, WeightCodes):
            own = weight.codes[first:end], weight.table, weight.scales[first:end]
            return WeightCodes(*own, weight.group_size)
        return weight[first:end]


def stored(
    weight: Weight,
    *,
    rounded_activations: bool = False,
    scales: Scales = "float32",
    alike: int = 1,
) -> StoredLinear:
    if isinstance(weight, WeightCodes):
        table = tuple(weight.table.tolist()) if len(weight.table) == 16 else None
        form = CodeForm(
            weight.group_size, table, alike=alike, float_activations=rounded_activations
        )
        return StoredLinear(InMemory(weight, form), PARTS, *weight.codes.shape)
    if not isinstance(weight, WeightIntegers):
        return StoredLinear(InMemory(weight, None), PARTS, *weight.shape)
    has_minimums = weight.zeros is not None or weight.minimums is not None
    form = IntegerForm(
        weight.bits,
        weight.group_size,
        has_minimums,
        scales,
        table=weight.table,
        permuted=weight.order is not None,
        integer_activations=rounded_activations,
    )
    sizes = weight.out_features, weight.in_features, weight.group_size
    return StoredLinear(InMemory(weight, form), PARTS, *sizes)


def held(
    weights: Sequence[Weight],
    dtype: torch.dtype,
    bias: Floats | None = None,
    *,
    rounded_activations: bool = False,
    formats: ComputedFormats = CUDA,
    scales: Scales = "float32",
    alike: int = 1,
) -> PackedLinear:
    """Make one layer of all weights."""
    decoding = PackedDecoding(str(dtype).removeprefix("torch."), formats)
    parts = [
        stored(weight, rounded_activations=rounded_activations, scales=scales, alike=alike)
        for weight in weights
    ]
    return decoding.held(parts, [] if bias is None else [stored(bias[:, None])])


def random_integers(
    out_features: int,
    in_features: int,
    group_size: int,
    bits: int,
    kind: str = "plain",
    *,
    scales: str = "float16",
    seed: int = 0,
) -> WeightIntegers:
    """Draw an asymmetric weight, with the largest values in one input.

    - kind: "plain", "zeros", "minimums", or "unsigned zeros", which are zeros of unsigned values.
    - scales: dtype that holds scales exactly: float16, bfloat16 or float32.
    """
    random = np.random.default_rng(seed + 1000 * out_features + in_features)
    unsigned = bits < 8 and kind in ("minimums", "unsigned zeros")
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values = random.integers(low, high + 1, (out_features, in_features)).astype(np.int8)
    values[:, in_features // 3] = high
    shape = out_features, -(-in_features // group_size)

    def parameters() -> Floats:
        found = np.exp(random.normal(-4, 1, shape)).astype(np.float32)
        found[::7, ::2] = 0
        found[::3] *= -1
        if scales == "float16":
            return found.astype(np.float16).astype(np.float32)
        if scales == "bfloat16":
            found *= np.float32(2.0**-16)
            return (found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return found

    zeros = random.integers(low, high + 1, shape).astype(np.int8) if "zeros" in kind else None
    minimums = parameters() if kind == "minimums" else None
    return WeightIntegers(values, parameters(), zeros, minimums, group_size, bits)


NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.5250731, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)
"""Table of NF4, from Dettmers et al., "QLoRA", 2023."""


def random_codes(
    out_features: int,
    in_features: int,
    group_size: int,
    table: Floats = E4M3,
    *,
    alike: int = 1,
    seed: int = 0,
) -> WeightCodes:
    """Draw all codes except NaN, and scales of any sign and size, shared by `alike` outputs."""
    random = np.random.default_rng(seed + 1000 * out_features + in_features)
    known = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    codes = random.choice(known, (out_features, in_features))
    codes.flat[: len(known)] = known[: codes.size]
    shape = -(-out_features // alike), -(-in_features // group_size)
    scales = np.exp(random.normal(-4, 1, shape)).astype(np.float32)
    scales[::3] *= -1
    each = np.repeat(scales, alike, axis=0)[:out_features]
    return WeightCodes(codes, table, each, group_size)


def exact(x: Tensor, weight: Floats, bias: Floats | None = None) -> tuple[Tensor, Tensor]:
    """Compute the product in float64, and the sum of its terms' magnitudes, to measure errors."""
    w, rows = torch.from_numpy(weight).double(), x.double().cpu()
    found, size = rows @ w.T, rows.abs() @ w.abs().T
    if bias is not None:
        added = torch.from_numpy(bias).double()
        found, size = found + added, size + added.abs()
    return found, size
