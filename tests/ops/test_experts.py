"""Mixtures of experts: native against plain torch, and rows with the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.ops import Linear, NativeBackend, ReferenceBackend
from aioserve.ops.experts import ExpertGate, Mixture, Routes
from aioserve.ops.native_experts import NativeMixture
from aioserve.ops.native_grouped import GroupedWeight, joined_linear, permuted_linear
from aioserve.ops.native_types import NativeLinear

NATIVE, REFERENCE = NativeBackend(), ReferenceBackend()
GATES: list[ExpertGate] = ["silu", "gelu_tanh", ClampedSwiglu(gain=1.3, limit=0.4)]
"""Activations. The last one clamps some gates and some ups."""
DTYPES = [torch.float32, torch.bfloat16]


def weights_of(
    experts: int, hidden: int, inner: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    return (
        [matrix(2 * inner, hidden) for _ in range(experts)],
        [matrix(hidden, inner) for _ in range(experts)],
    )


def mixture_of(
    backend: NativeBackend | ReferenceBackend,
    weights: tuple[Sequence[Tensor], Sequence[Tensor]],
    gate: ExpertGate = "silu",
) -> Mixture:
    ups, downs = weights
    return backend.mixture(
        Routing(experts=len(ups), top_k=1),
        [backend.linear(up) for up in ups],
        [backend.linear(down, out_dtype=torch.float32) for down in downs],
        gate=gate,
    )


def rows_of(rows: int, hidden: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routes_of(rows: int, experts: int, top_k: int, seed: int = 6, *, holes: bool = False) -> Routes:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)]
        or [torch.empty(top_k)]
    )[:rows]
    if holes:
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    return Routes(ids.int(), torch.rand(rows, top_k, generator=generator))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES, ids=str)
@given(
    rows=st.integers(0, 40),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 5),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 40),
    holes=st.booleans(),
)
def test_rows_have_the_sums_of_plain_torch(
    rows: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    holes: bool,
    gate: ExpertGate,
    dtype: torch.dtype,
) -> None:
    weights = weights_of(experts, hidden, inner, dtype)
    x = rows_of(rows, hidden, dtype)
    routes = routes_of(rows, experts, min(top_k, experts), holes=holes)

    y = mixture_of(NATIVE, weights, gate)(x, routes)

    expected = mixture_of(REFERENCE, weights, gate)(x, routes)
    assert y.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_instruction_set_has_the_sums_of_plain_torch(isa: str, gate: ExpertGate) -> None:
    for dtype in DTYPES:
        weights, x = weights_of(5, 48, 32, dtype), rows_of(9, 48, dtype)
        routes = routes_of(9, 5, 2)
        y = mixture_of(NATIVE, weights, gate)(x, routes)
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        expected = mixture_of(REFERENCE, weights, gate)(x, routes)
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def integers(rows: int, columns: int, generator: np.random.Generator) -> NativeLinear:
    weight = GroupedWeight(rows, columns, group_size=32, bits=4, dtype=torch.bfloat16)
    values = generator.integers(-8, 8, (rows, columns), dtype=np.int8)
    scales = generator.random((rows, columns // 32), dtype=np.float32) * 0.02
    weight.set_rows(0, values, scales)
    return weight.linear()


def floats(rows: int, columns: int, generator: np.random.Generator) -> NativeLinear:
    weight = generator.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
    return NativeLinear(torch.from_numpy(weight).bfloat16())


def joined(rows: int, columns: int, generator: np.random.Generator) -> NativeLinear:
    halves = [make(rows // 2, columns, generator) for make in (integers, floats)]
    return joined_linear(halves)


def permuted(rows: int, columns: int, generator: np.random.Generator) -> NativeLinear:
    order = generator.permutation(columns).astype(np.int32)
    return permuted_linear(integers(rows, columns, generator), order)


KINDS = {"floats": floats, "integers": integers, "joined": joined, "permuted": permuted}


def kernels_of(
    kind: str, experts: int, hidden: int, inner: int
) -> tuple[list[Linear], list[Linear]]:
    make = KINDS[kind]
    generator = np.random.default_rng(3)
    ups = [make(2 * inner, hidden, generator) for _ in range(experts)]
    downs = [
        NativeLinear.of_packed(make(hidden, inner, generator).packed, torch.float32)
        for _ in range(experts)
    ]
    return [*ups], [*downs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(kind: str) -> None:
    """Rows come in another order, some of them, one by one, and with other thread counts."""
    ups, downs = kernels_of(kind, 6, 64, 96)
    mixture = NATIVE.mixture(Routing(experts=6, top_k=1), ups, downs)
    x, routes = rows_of(70, 64, torch.bfloat16), routes_of(70, 6, 3)
    whole = mixture(x, routes)
    assert whole.isfinite().all()

    def of(rows: Tensor) -> Tensor:
        return mixture(x[rows], Routes(routes.ids[rows], routes.weights[rows]))

    order = torch.randperm(70, generator=torch.Generator().manual_seed(8))
    assert torch.equal(of(order), whole[order])
    for row in range(0, 70, 7):
        assert torch.equal(of(torch.tensor([row])), whole[[row]])
    for count in (2, 3, 17, 33):
        assert torch.equal(of(order[:count]), whole[order[:count]])


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind: str, threads: None) -> None:
    ups, downs = kernels_of(kind, 6, 64, 96)
    mixture = NATIVE.mixture(Routing(experts=6, top_k=1), ups, downs)
    x, routes = rows_of(70, 64, torch.bfloat16), routes_of(70, 6, 3)
    whole = mixture(x, routes)
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        assert torch.equal(mixture(x, routes), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_of_the_experts_changes_no_bit(kind: str) -> None:
    ups, downs = kernels_of(kind, 7, 64, 32)
    x, routes = rows_of(300, 64, torch.bfloat16), routes_of(300, 7, 4)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(9))
    routing = Routing(experts=7, top_k=1)

    plain = NATIVE.mixture(routing, ups, downs)(x, routes)
    moved = NATIVE.mixture(routing, [ups[i] for i in order], [downs[i] for i in order])
    ids = order.argsort()[routes.ids.long()].int()

    assert torch.equal(moved(x, Routes(ids, routes.weights)), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_experts_are_zero_and_change_no_others(dtype: torch.dtype) -> None:
    """There are five experts, not a multiple of any kernel's block. Padding is NaN."""
    mixture = mixture_of(NATIVE, weights_of(5, 48, 32, dtype))
    x, routes = rows_of(11, 48, dtype), routes_of(11, 5, 2)
    alone = mixture(x, routes)
    nothing = torch.full((4, 48), float("nan"), dtype=dtype)
    padded = Routes(
        torch.cat([routes.ids, torch.full((4, 2), -1, dtype=torch.int32)]),
        torch.cat([routes.weights, torch.full((4, 2), float("nan"))]),
    )

    y = mixture(torch.cat([x, nothing]), padded)

    assert torch.equal(y[:11], alone)
    assert (y[11:] == 0).all()
    only_padding = mixture(nothing, Routes(padded.ids[11:], padded.weights[11:]))
    assert (only_padding == 0).all()


@pytest.mark.parametrize("backend", [NATIVE, REFERENCE], ids=["native", "reference"])
@pytest.mark.parametrize("wrong", [-2, 5, 1 << 30])
def test_ids_of_no_expert_are_refused(
    wrong: int, backend: NativeBackend | ReferenceBackend
) -> None:
    mixture = mixture_of(backend, weights_of(5, 8, 8, torch.float32))
    routes = routes_of(3, 5, 2)
    routes.ids[1, 1] = wrong
    with pytest.raises(ValueError, match="ids must be from -1 to 4"):
        mixture(rows_of(3, 8, torch.float32), routes)


def test_experts_that_differ_are_refused() -> None:
    ups, downs = kernels_of("floats", 2, 64, 32)
    wide, _ = kernels_of("floats", 1, 64, 48)
    with pytest.raises(ValueError, match="experts must be alike"):
        NativeMixture(Routing(experts=2, top_k=1), [ups[0], wide[0]], downs)
    with pytest.raises(ValueError, match="experts must be alike"):
        NativeMixture(
            Routing(experts=2, top_k=1), ups, [downs[0], floats(64, 32, np.random.default_rng())]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [NATIVE, REFERENCE], ids=["native", "reference"])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 47), (300, 64)])
def test_rows_are_scaled_by_the_sigmoids_of_their_gates(
    shape: tuple[int, int], backend: NativeBackend | ReferenceBackend, dtype: torch.dtype
) -> None:
    x = rows_of(*shape, dtype)
    gate = rows_of(shape[0], 1, torch.float32, seed=1) * 4
    expected = (x.float() * gate.sigmoid()).to(dtype)
    backend.sigmoid_scale(x, gate)
    torch.testing.assert_close(x, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)
