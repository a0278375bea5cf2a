"""Norms and gated activations of the GPU against the reference in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.ops.backend import RMSNorm
from aioserve.ops.gpu.backend import CudaBackend
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.scenarios import REFERENCE, random
from tests.tiers import examples

round_bfloat16_to_nearest()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 37), (5, 515), (2, 4096)]
gates = pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def backend(device: torch.device):
    return CudaBackend(device)


def close(got: Tensor, expected: Tensor) -> None:
    """Compare within some rounding steps of float32, or within the final rounding of others."""
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[got.dtype]
    atol = 1e-6 if got.dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.double().cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
def test_rms_norm_agrees(backend, dtype, shape, offset) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    got = backend.rms_norm(backend.place(x), RMSNorm(backend.place(weight), 1e-6, offset))
    assert got.dtype == dtype
    close(got, REFERENCE.rms_norm(x.double(), RMSNorm(weight.double(), 1e-6, offset)))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
def test_rms_norm_of_a_sum_sees_it_as_it_is_stored(backend, dtype, shape, offset) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    total, kept = residual + x, backend.place(residual.clone())
    got = backend.rms_norm(backend.place(x), RMSNorm(backend.place(weight), 1e-6, offset), kept)
    assert torch.equal(kept.cpu(), total)
    close(got, REFERENCE.rms_norm(total.double(), RMSNorm(weight.double(), 1e-6, offset)))
    # Equal bits show that the norm reads the rounded sum.
    assert torch.equal(got, backend.rms_norm(kept, RMSNorm(backend.place(weight), 1e-6, offset)))


@given(rows=st.integers(0, 4), size=st.integers(1, 700), dtype=st.sampled_from(DTYPES))
@settings(max_examples=examples(30), deadline=None)
def test_any_shape_agrees(rows: int, size: int, dtype: torch.dtype) -> None:
    backend = CudaBackend("cuda" if torch.cuda.is_available() else "cpu")
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    norm = backend.rms_norm(backend.place(x), RMSNorm(backend.place(weight), 1e-5))
    close(norm, REFERENCE.rms_norm(x.double(), RMSNorm(weight.double(), 1e-5)))
    gates = 3 * random(rows, 2 * size, dtype=dtype, seed=2)
    for gelu in (False, True):
        got = backend.gated(backend.place(gates), gelu=gelu)
        close(got, REFERENCE.gated(gates.double(), gelu=gelu))


def test_rows_of_a_strided_view_are_taken_as_they_lie(backend) -> None:
    wide, weight = backend.place(random(5, 64)), backend.place(random(40, seed=1))
    expected = backend.rms_norm(wide[:, :40].contiguous(), RMSNorm(weight, 1e-6))
    assert torch.equal(backend.rms_norm(wide[:, :40], RMSNorm(weight, 1e-6)), expected)
    for gelu in (False, True):
        gated = partial(backend.gated, gelu=gelu)
        assert torch.equal(gated(wide[:, :40]), gated(wide[:, :40].contiguous()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@gates
@dtypes
def test_gated_activations_agree(backend, dtype, gelu, shape) -> None:
    gate_up = 3 * random(shape[0], 2 * shape[1], dtype=dtype)
    got = backend.gated(backend.place(gate_up), gelu=gelu)
    assert got.dtype == dtype
    close(got, REFERENCE.gated(gate_up.double(), gelu=gelu))


@gates
def test_activations_keep_their_limits(backend, gelu) -> None:
    gate = torch.tensor([[-1e4, -88.0, -0.0, 1e-30, 88.0, 1e4, float("inf"), float("nan")]])
    rows = backend.place(torch.cat([gate, torch.ones_like(gate)], dim=1))
    got = backend.gated(rows, gelu=gelu)[0].cpu()
    assert got[:2].abs().max() < 1e-30
    assert got[2] == 0
    torch.testing.assert_close(got[3:7], gate[0, 3:7] * torch.tensor([0.5, 1, 1, 1]))
    assert got[7].isnan()


@dtypes
def test_a_row_does_not_depend_on_its_neighbours(backend, dtype) -> None:
    x, weight = backend.place(random(9, 768, dtype=dtype)), random(768, dtype=dtype)
    weight = backend.place(weight)
    ops = [
        lambda rows: backend.rms_norm(rows, RMSNorm(weight, 1e-6)),
        lambda rows: backend.rms_norm(rows, RMSNorm(weight, 1e-6), rows.flip(1).contiguous()),
        partial(backend.gated, gelu=False),
        partial(backend.gated, gelu=True),
    ]
    for op in ops:
        together = op(x)
        broken = x.clone()
        broken[:5] = float("nan")
        assert torch.equal(op(x[5:6]), together[5:6])
        assert torch.equal(op(broken)[5:], together[5:])


def test_arguments_that_do_not_fit_are_refused_by_name(backend) -> None:
    x, weight = backend.place(random(3, 8)), backend.place(random(8))
    strided = backend.place(random(3, 16))[:, ::2]
    for wrong in (strided, weight, x.to("meta")):
        with pytest.raises(ValueError, match=r"x must have shape \[T, H\] with dense rows"):
            backend.rms_norm(wrong, RMSNorm(weight, 1e-6))
        with pytest.raises(ValueError, match=r"gate_up must have shape \[T, 2 \* I\]"):
            backend.gated(wrong, gelu=False)
    with pytest.raises(ValueError, match=r"weight must be contiguous, of shape \(8,\)"):
        backend.rms_norm(x, RMSNorm(weight[:7], 1e-6))
    with pytest.raises(TypeError, match=r"weight must be torch.float32, got torch.bfloat16"):
        backend.rms_norm(x, RMSNorm(weight.bfloat16(), 1e-6))
    with pytest.raises(ValueError, match=r"residual must be contiguous, of shape \(3, 8\)"):
        backend.rms_norm(x, RMSNorm(weight, 1e-6), x[:2])
    double = r"must be float32, bfloat16 or float16, got torch.float64"
    with pytest.raises(TypeError, match=f"x {double}"):
        backend.rms_norm(x.double(), RMSNorm(weight.double(), 1e-6))
    with pytest.raises(TypeError, match=f"gate_up {double}"):
        backend.gated(x.double(), gelu=True)
    long = torch.zeros(1, 40_000, device=backend.device)
    with pytest.raises(ValueError, match="x must have rows of at most 32768, got 40000"):
        backend.rms_norm(long, RMSNorm(long[0], 1e-6))
