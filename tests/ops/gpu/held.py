"""Layers of integers as GPUs hold them, and what they must compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aioserve.models.computed import CUDA, ComputedFormats, HeldLinear
from aioserve.models.grouped import GroupedIntegers
from aioserve.models.held_decoding import HeldDecoding
from aioserve.models.stored import Floats, Format, IntegerForm, Rows, StoredLinear, StoredTensor

__all__ = ["InMemory", "exact", "held", "random_integers", "stored"]


PARTS = {"weight": StoredTensor(Path("memory"), "weight", -1, 0, 0, "U8", (1, 1))}


@dataclass(frozen=True, eq=False)
class InMemory(Format):
    """A weight that is there."""

    weight: GroupedIntegers | Floats
    form: IntegerForm | None

    @property
    def name(self) -> str:
        return "memory"

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        return self.form

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        if isinstance(self.weight, GroupedIntegers):
            return self.weight.rows(first, end)
        return self.weight[first:end]


def stored(weight: GroupedIntegers | Floats, *, integer_activations: bool = False) -> StoredLinear:
    if not isinstance(weight, GroupedIntegers):
        return StoredLinear(InMemory(weight, None), PARTS, *weight.shape)
    has_minimums = weight.zeros is not None or weight.minimums is not None
    form = IntegerForm(
        weight.bits,
        weight.group_size,
        has_minimums,
        table=weight.table,
        permuted=weight.order is not None,
        integer_activations=integer_activations,
    )
    sizes = weight.out_features, weight.in_features, weight.group_size
    return StoredLinear(InMemory(weight, form), PARTS, *sizes)


def held(
    weights: Sequence[GroupedIntegers | Floats],
    dtype: torch.dtype,
    bias: Floats | None = None,
    *,
    integer_activations: bool = False,
    formats: ComputedFormats = CUDA,
) -> HeldLinear:
    """One layer of all of them."""
    decoding = HeldDecoding(str(dtype).removeprefix("torch."), formats)
    parts = [stored(weight, integer_activations=integer_activations) for weight in weights]
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
) -> GroupedIntegers:
    """Neither symmetric nor alike, with one input of the largest values.

    kind: "plain", "zeros", "minimums", or "unsigned zeros", which are those of values from 0 on.
    scales: what holds them exactly: float16, bfloat16 or float32.
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
    return GroupedIntegers(values, parameters(), zeros, minimums, group_size, bits)


def exact(x: Tensor, weight: Floats, bias: Floats | None = None) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of its terms' sizes, which errors are measured by."""
    w, rows = torch.from_numpy(weight).double(), x.double().cpu()
    found, size = rows @ w.T, rows.abs() @ w.abs().T
    if bias is not None:
        added = torch.from_numpy(bias).double()
        found, size = found + added, size + added.abs()
    return found, size
