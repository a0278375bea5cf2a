"""Norms and gated activations against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.backend import LayerNorm, RMSNorm
from aioserve.ops.checks import ACTIVATIONS, Activation
from tests.ops.scenarios import BACKENDS, DTYPES, NATIVE, REFERENCE, random

SHAPES = [(1, 16), (3, 37), (33, 515), (200, 1024)]
gates = pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(got: Tensor, expected: Tensor) -> None:
    """Float32 to some rounding steps; bfloat16 to the one rounding at the end."""
    if got.dtype is torch.float32:
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)
    else:
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
def test_rms_norm_agrees(
    isa: str, dtype: torch.dtype, shape: tuple[int, int], offset: float
) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    got = NATIVE.rms_norm(x, RMSNorm(weight, 1e-6, offset))
    expected = REFERENCE.rms_norm(x.double(), RMSNorm(weight.double(), 1e-6, offset))
    assert got.dtype == dtype
    close(got, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
def test_rms_norm_of_a_sum_agrees_and_updates_the_residual(
    isa: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    total = residual + x
    got = NATIVE.rms_norm(x, RMSNorm(weight, 1e-6), residual)
    assert torch.equal(residual, total)
    close(got, REFERENCE.rms_norm(total.double(), RMSNorm(weight.double(), 1e-6)))


def test_rows_of_a_strided_view_are_normalised(isa: str) -> None:
    wide, weight = random(5, 64), random(40, seed=1)
    expected = NATIVE.rms_norm(wide[:, :40].contiguous(), RMSNorm(weight, 1e-6))
    assert torch.equal(NATIVE.rms_norm(wide[:, :40], RMSNorm(weight, 1e-6)), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@gates
@dtypes
def test_gated_activations_agree(
    isa: str, dtype: torch.dtype, gelu: bool, shape: tuple[int, int]
) -> None:
    gate_up = 3 * random(shape[0], 2 * shape[1], dtype=dtype)
    got = NATIVE.gated(gate_up, gelu=gelu)
    assert got.dtype == dtype
    close(got, REFERENCE.gated(gate_up.double(), gelu=gelu))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
def test_activations_without_a_gate_agree(
    isa: str, dtype: torch.dtype, shape: tuple[int, int], kind: Activation
) -> None:
    x = 3 * random(*shape, dtype=dtype)
    got = NATIVE.activated(x, kind)
    assert got.dtype == dtype
    close(got, REFERENCE.activated(x.double(), kind))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_without_a_gate_keep_their_limits(isa: str, kind: Activation) -> None:
    x = torch.tensor([[-1e4, -88.0, -0.0, 1e-30, 88.0, 1e4, float("inf"), float("nan")]])
    got = NATIVE.activated(x, kind)[0]
    assert got[:2].abs().max() < 1e-30
    assert got[2] == 0
    factors = torch.tensor([0.5, 1, 1, 1])
    expected = x[0, 3:7].square() if kind == "relu_squared" else x[0, 3:7] * factors
    torch.testing.assert_close(got[3:7], expected)
    assert got[7].isnan()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@dtypes
def test_the_norm_of_some_columns_leaves_the_others(
    isa: str, dtype: torch.dtype, offset: float
) -> None:
    x, weight = random(5, 60, dtype=dtype), random(37, dtype=dtype, seed=1)
    norm = RMSNorm(weight, 1e-5, offset)
    expected = x.clone()
    expected[:, 11:48] = NATIVE.rms_norm(x[:, 11:48].contiguous(), norm)
    NATIVE.norm_columns(x, norm, 11)
    assert torch.equal(x, expected)
    for first in (-1, 24):
        with pytest.raises(ValueError, match="first must leave columns"):
            NATIVE.norm_columns(x, norm, first)


@gates
def test_activations_keep_their_limits(isa: str, gelu: bool) -> None:
    gate = torch.tensor([[-1e4, -88.0, -0.0, 1e-30, 88.0, 1e4, float("inf"), float("nan")]])
    got = NATIVE.gated(torch.cat([gate, torch.ones_like(gate)], dim=1), gelu=gelu)[0]
    assert got[:2].abs().max() < 1e-30
    assert got[2] == 0
    torch.testing.assert_close(got[3:7], gate[0, 3:7] * torch.tensor([0.5, 1, 1, 1]))
    assert got[7].isnan()


@dtypes
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    x, weight = random(500, 768, dtype=dtype), random(768, dtype=dtype)
    gate = random(768, dtype=dtype, seed=2)
    ops: list[Callable[[Tensor], Tensor]] = [
        lambda rows: NATIVE.rms_norm(rows, RMSNorm(weight, 1e-6)),
        lambda rows: NATIVE.rms_norm(rows, RMSNorm(weight, 1e-6), gate.expand(rows.shape).clone()),
        partial(NATIVE.gated, gelu=False),
        partial(NATIVE.gated, gelu=True),
    ]
    for op in ops:
        _native.set_num_threads(3)
        together = op(x)
        _native.set_num_threads(1)
        assert torch.equal(op(x), together)
        assert torch.equal(op(x[123:124]), together[123:124])


def test_dtypes_that_kernels_do_not_have_are_refused() -> None:
    with pytest.raises(TypeError, match=r"x must be float32 or bfloat16, got torch.float64"):
        NATIVE.rms_norm(random(3, 8).double(), RMSNorm(random(8).double(), 1e-6))


@backends
def test_arguments_that_do_not_fit_are_refused_by_name(backend: Backend) -> None:
    x, weight = random(3, 8), random(8)
    residual = random(3, 8)
    before = residual.clone()
    strided, ints = random(3, 16)[:, ::2], torch.zeros(3, 8, dtype=torch.int64)
    other = torch.zeros(3, 8, device="meta")
    for wrong in (strided, random(8), random(2, 3, 8), other):
        for norm in (
            lambda: backend.rms_norm(wrong, RMSNorm(weight, 1e-6)),  # noqa: B023
            lambda: backend.layer_norm(wrong, LayerNorm(weight, None, 1e-6)),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"x must have shape \[T, H\] with dense rows"):
                norm()
    for name, norm in (
        ("weight", lambda wrong: backend.rms_norm(x, RMSNorm(wrong, 1e-6))),
        ("weight", lambda wrong: backend.rms_norm(x, RMSNorm(wrong, 1e-6), residual)),
        ("weight", lambda wrong: backend.layer_norm(x, LayerNorm(wrong, None, 1e-6))),
        ("bias", lambda wrong: backend.layer_norm(x, LayerNorm(weight, wrong, 1e-6))),
    ):
        with pytest.raises(TypeError, match=f"{name} must be torch.float32, got torch.bfloat16"):
            norm(weight.bfloat16())
        for wrong in (random(7), random(1, 8), random(1), random(16)[::2], weight.to("meta")):
            with pytest.raises(ValueError, match=rf"{name} must be contiguous, of shape \(8,\)"):
                norm(wrong)
    for wrong in (random(2, 8), random(1, 8), strided, x.to("meta")):
        with pytest.raises(ValueError, match=r"residual must be contiguous, of shape \(3, 8\)"):
            backend.rms_norm(x, RMSNorm(weight, 1e-6), wrong)
    with pytest.raises(TypeError, match=r"residual must be torch.float32, got torch.bfloat16"):
        backend.rms_norm(x, RMSNorm(weight, 1e-6), x.bfloat16())
    assert torch.equal(residual, before)
    for gated in (partial(backend.gated, gelu=gelu) for gelu in (False, True)):
        for wrong in (random(3, 7), random(8), strided, other):
            with pytest.raises(ValueError, match=r"gate_up must have shape \[T, 2 \* I\]"):
                gated(wrong)
    for op in (
        lambda: backend.rms_norm(ints, RMSNorm(weight, 1e-6)),
        lambda: backend.layer_norm(ints, LayerNorm(weight, None, 1e-6)),
        lambda: backend.gated(ints, gelu=False),
        lambda: backend.gated(ints, gelu=True),
    ):
        with pytest.raises(TypeError, match=r"(x|gate_up) must be .*, got torch.int64"):
            op()
