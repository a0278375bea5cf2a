"""Sums of bfloat16 pairs, bit for bit, as Intel documents their instructions.

"Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, VDPBF16PS and TDPBF16PS.
These are fused multiply-adds that round to nearest even. They read denormal numbers as zeros, and
return zeros for them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.native import NativeLinear

Floats = npt.NDArray[np.float32]

CPU_INFO = _native.cpu_info()
ISAS = CPU_INFO["isas_supported"] + CPU_INFO["isas_emulated"]
SMALLEST_NORMAL = np.float32(2**-126)
ROWS, OUT_FEATURES = 35, 37


def without_denormals(x: Floats) -> Floats:
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def multiply_add(a: Floats, b: Floats, total: Floats) -> Floats:
    """Compute a fused multiply-add of bfloat16 factors.

    The product is exact in float64. So is the sum, whenever it is close to a tie of float32."""
    exact = a.astype(np.float64) * b.astype(np.float64) + total.astype(np.float64)
    return without_denormals(exact.astype(np.float32))


def sums_by_vdpbf16ps(x: Floats, weight: Floats) -> Floats:
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in range(0, x.shape[1], 2):
        total = multiply_add(x[:, k + 1, None], weight[:, k + 1], total)
        total = multiply_add(x[:, k, None], weight[:, k], total)
    return total


def sums_by_tdpbf16ps(x: Floats, weight: Floats) -> Floats:
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, x.shape[1], 32):  # an instruction's share
        first = second = np.zeros_like(total)
        for k in range(begin, min(begin + 32, x.shape[1]), 2):
            first = multiply_add(x[:, k, None], weight[:, k], first)
            second = multiply_add(x[:, k + 1, None], weight[:, k + 1], second)
        total = without_denormals(total + without_denormals(first + second))
    return total


MODELS = {"avx512_bf16": sums_by_vdpbf16ps, "amx_bf16": sums_by_tdpbf16ps}


def operands(in_features: int) -> tuple[Tensor, Tensor]:
    """Draw factors of all sizes. Some factors, products and sums are denormal."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, in_features, generator=generator)
    weight = torch.randn(OUT_FEATURES, in_features, generator=generator)
    x *= torch.logspace(0, -38, ROWS)[:, None]
    x[1::5, ::3] *= 1e-3
    weight[::4] *= 1e-3
    x[-1, 5] = 1e-39
    weight[5, 7:60:9] = 2e-39
    return x.bfloat16(), weight.bfloat16()


def even_width(x: Tensor) -> Floats:
    wide = without_denormals(x.float().numpy())
    return np.pad(wide, ((0, 0), (0, wide.shape[1] % 2)))


@pytest.mark.parametrize("in_features", [71, 96])  # a tile's last part, and whole tiles
@pytest.mark.parametrize("isa", [name for name in ISAS if name.removesuffix("_emulated") in MODELS])
def test_sums_are_those_of_the_documented_instruction(isa: str, in_features: int) -> None:
    x, weight = operands(in_features)
    before = CPU_INFO["isa"]
    layer = NativeLinear(weight, out_dtype=torch.float32)
    _native.set_isa(isa)
    try:
        y = layer(x).numpy()
        alone = np.concatenate([layer(x[i : i + 1]).numpy() for i in range(ROWS)])
        rounded = NativeLinear(weight)(x)
    finally:
        _native.set_isa(before)
    expected = MODELS[isa.removesuffix("_emulated")](even_width(x), even_width(weight))
    assert (np.abs(expected) >= SMALLEST_NORMAL).any(axis=0).all()
    assert (expected == 0).any(), "no sum is small enough to become zero"
    assert np.array_equal(y.view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(alone.view(np.uint32), expected.view(np.uint32))
    assert torch.equal(rounded, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("isa", MODELS)
def test_emulated_instructions_give_the_bits_of_the_real_ones(isa: str) -> None:
    if isa not in ISAS:
        pytest.skip(f"this machine has no {isa}")
    if f"{isa}_emulated" not in ISAS:
        pytest.skip(f"this build has no {isa}_emulated: make build ISAS=all")
    layer = NativeLinear(torch.randn(70, 130).bfloat16(), out_dtype=torch.float32)
    x = torch.randn(50, 130).bfloat16()
    before = CPU_INFO["isa"]
    try:
        _native.set_isa(isa)
        real = layer(x)
        _native.set_isa(f"{isa}_emulated")
        emulated = layer(x)
    finally:
        _native.set_isa(before)
    assert torch.equal(real, emulated)


def test_emulated_instructions_are_never_chosen_by_themselves() -> None:
    assert not set(CPU_INFO["isas_supported"]) & set(CPU_INFO["isas_emulated"])
    amx = {"amx_bf16_emulated", "amx_int8_emulated"}  # which any CPU runs
    assert amx & {*CPU_INFO["isas_emulated"]} == amx & {*CPU_INFO["isas_compiled"]}
