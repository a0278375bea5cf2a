"""Quantised experts of the GPU: the bits of their layers, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.errors import UnsupportedModelError
from aioserve.formats.routing import ClampedSwiglu, Routing
from aioserve.formats.weights import PackedLinear
from aioserve.models.stored import Floats
from aioserve.models.weight_integers import E2M1_TWICE, WeightIntegers
from aioserve.ops.experts import ExpertGate, Mixture, Routes
from aioserve.ops.gpu import rowwise
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.grouped_linear import GroupedLinear, GroupedRun
from tests.ops.gpu.held import NF4, held, random_codes, random_integers
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.test_experts import GATES, routes_of, rows_of
from tests.tiers import examples

round_bfloat16_to_nearest()

Make = Callable[[int, int, torch.dtype, int, Floats | None], PackedLinear]
"""Function that makes a random layer from outputs, inputs, dtype, seed, and bias."""


def integers(
    bits: int,
    group: int,
    kind: str = "plain",
    *,
    rounded: bool = False,
    scales: str = "float16",
) -> Make:
    def make(
        outputs: int, inputs: int, dtype: torch.dtype, seed: int, bias: Floats | None
    ) -> PackedLinear:
        sizes = outputs, inputs, group or inputs, bits, kind
        weight = random_integers(*sizes, scales=scales, seed=seed)
        return held([weight], dtype, bias, rounded_activations=rounded)

    return make


def codes(table: str, group: int, *, alike: int = 1, rounded: bool = False) -> Make:
    def make(
        outputs: int, inputs: int, dtype: torch.dtype, seed: int, bias: Floats | None
    ) -> PackedLinear:
        sizes = outputs, inputs, group
        weight = (
            random_codes(*sizes, NF4, seed=seed)
            if table == "nf4"
            else random_codes(*sizes, alike=alike, seed=seed)
        )
        return held([weight], dtype, bias, rounded_activations=rounded, alike=alike)

    return make


def mxfp4(
    outputs: int, inputs: int, dtype: torch.dtype, seed: int, bias: Floats | None
) -> PackedLinear:
    plain = random_integers(outputs, inputs, 32, 8, scales="bfloat16", seed=seed)
    values = np.array(E2M1_TWICE, np.int8)[plain.values.view(np.uint8) & 15]
    weight = WeightIntegers(values, plain.scales, None, None, 32, 4, E2M1_TWICE)
    return held([weight], dtype, bias)


def permuted(
    outputs: int, inputs: int, dtype: torch.dtype, seed: int, bias: Floats | None
) -> PackedLinear:
    """Make a layer of two runs, each with an input order of its own."""
    random, first = np.random.default_rng(seed), outputs // 2
    weights = [
        replace(
            random_integers(size, inputs, 32, 4, "zeros", seed=seed),
            order=random.permutation(inputs).astype(np.int32),
        )
        for size in (first, outputs - first)
    ]
    return held(weights, dtype, bias)


def joined(
    outputs: int, inputs: int, dtype: torch.dtype, seed: int, bias: Floats | None
) -> PackedLinear:
    """Make a layer of 4-bit integers, then floats, then 8-bit integers with minimums."""
    first, second = max(outputs // 3, 1), max(outputs // 2, 2)
    floats = np.random.default_rng(seed).standard_normal((second - first, inputs)) / 8
    weights = [
        random_integers(first, inputs, 32, 4, seed=seed),
        floats.astype(np.float32),
        random_integers(outputs - second, inputs, 16, 8, "minimums", seed=seed),
    ]
    return held(weights, dtype, bias)


KINDS: dict[str, Make] = {
    "int4": integers(4, 32),
    "int4 zeros": integers(4, 128, "zeros"),
    "int4 minimums": integers(4, 64, "minimums", scales="float32"),
    "int8 rows": integers(8, 0),
    "mxfp4": mxfp4,
    "nf4": codes("nf4", 64),
    "fp8 blocks": codes("e4m3", 128, alike=16),
    "rounded int8": integers(8, 128, rounded=True),
    "rounded int4 minimums": integers(4, 32, "minimums", rounded=True),
    "rounded fp8": codes("e4m3", 128, rounded=True),
    "permuted": permuted,
    "joined": joined,
}


@pytest.fixture(scope="module")
def backend(device: torch.device) -> CudaBackend:
    return CudaBackend(device)


def layers_of(
    backend: CudaBackend,
    make: Make,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    has_biases: bool = False,
) -> tuple[list[GroupedLinear], list[GroupedLinear]]:
    """Make ups and downs of experts, with `sizes` (experts, hidden, inner)."""
    experts, hidden, inner = sizes

    def layer(outputs: int, inputs: int, seed: int, out_dtype: torch.dtype | None) -> GroupedLinear:
        bias = None
        if has_biases:
            bias = np.random.default_rng(seed).standard_normal(outputs).astype(np.float32)
        made = backend.linear(make(outputs, inputs, dtype, seed, bias), out_dtype=out_dtype)
        assert isinstance(made, GroupedLinear)
        return made

    ups = [layer(2 * inner, hidden, 2 * i, None) for i in range(experts)]
    return ups, [layer(hidden, inner, 2 * i + 1, torch.float32) for i in range(experts)]


def mixture_of(
    backend: CudaBackend,
    layers: tuple[Sequence[GroupedLinear], Sequence[GroupedLinear]],
    gate: ExpertGate = "silu",
) -> Mixture:
    ups, downs = layers
    return backend.mixture(Routing(experts=len(ups), top_k=1), ups, downs, gate=gate)


def active(gate: ExpertGate, up: Tensor) -> Tensor:
    if isinstance(gate, ClampedSwiglu):
        return rowwise.clamped_swiglu(up, gate)
    return rowwise.gated(up, gate == "gelu_tanh")


def size(numbers: Tensor) -> float:
    return numbers.abs().max().item() if numbers.numel() else 0.0


def placed(backend: CudaBackend, routes: Routes) -> Routes:
    return Routes(*map(backend.place, routes))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(3))
@given(
    rows=st.integers(0, 24),
    experts=st.integers(1, 4),
    hidden=st.integers(3, 150),
    inner=st.integers(2, 70),
    gate=st.sampled_from(GATES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_biases=st.booleans(),
)
def test_an_expert_has_the_bits_of_its_layers(
    kind: str,
    rows: int,
    experts: int,
    hidden: int,
    inner: int,
    gate: ExpertGate,
    dtype: torch.dtype,
    has_biases: bool,
    backend: CudaBackend,
) -> None:
    """Expected rows are from the layers of their experts, before these are stacked."""
    ups, downs = layers_of(
        backend, KINDS[kind], (experts, hidden, inner), dtype, has_biases=has_biases
    )
    x, routes = backend.place(rows_of(rows, hidden, dtype)), routes_of(rows, experts, 1)
    routes = Routes(routes.ids, torch.ones_like(routes.weights))
    expected = torch.empty_like(x)
    for row, (expert,) in enumerate(routes.ids.tolist()):
        up = ups[expert](x[row : row + 1])
        expected[row] = downs[expert](active(gate, up)).to(dtype)

    y = mixture_of(backend, (ups, downs), gate)(x, placed(backend, routes))

    assert y.isfinite().all()
    if kind == "joined":  # another library multiplies the floats of a single layer
        tolerance = 1e-4 if dtype is torch.float32 else 4e-2
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance * size(expected))
    else:
        assert torch.equal(y, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(kind: str, backend: CudaBackend) -> None:
    """An expert has more rows than a block: alone, in another order, and with padding.

    Experts come in another order, too."""
    dtype, (experts, hidden, inner) = torch.bfloat16, (4, 130, 24)
    layers = layers_of(backend, KINDS[kind], (experts, hidden, inner), dtype, has_biases=True)
    mixture = mixture_of(backend, layers)
    x, routes = backend.place(rows_of(40, hidden, dtype)), placed(backend, routes_of(40, 4, 2))
    whole = mixture(x, routes)
    assert whole.isfinite().all()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).to(x.device)

    def of(rows: Tensor) -> Tensor:
        return mixture(x[rows], Routes(routes.ids[rows], routes.weights[rows]))

    assert torch.equal(of(order), whole[order])
    assert torch.equal(of(order[:17]), whole[order[:17]])
    for row in (0, 31):
        assert torch.equal(of(torch.tensor([row])), whole[[row]])
    nothing = torch.full((4, hidden), float("nan"), dtype=dtype, device=x.device)
    padding = Routes(
        torch.full((4, 2), -1, dtype=torch.int32, device=x.device),
        torch.full((4, 2), float("nan"), device=x.device),
    )
    padded = Routes(*(torch.cat(both) for both in zip(routes, padding, strict=True)))
    y = mixture(torch.cat([x, nothing]), padded)
    assert torch.equal(y[:40], whole)
    assert (y[40:] == 0).all()
    assert (mixture(nothing, padding) == 0).all()
    moved = torch.tensor([3, 0, 1, 2])
    ups, downs = layers_of(backend, KINDS[kind], (experts, hidden, inner), dtype, has_biases=True)
    other = mixture_of(backend, ([ups[i] for i in moved], [downs[i] for i in moved]))
    ids = moved.argsort().to(x.device)[routes.ids.long()].int()
    assert torch.equal(other(x, Routes(ids, routes.weights)), whole)


def test_the_weights_are_held_once_and_stay_what_they_are(backend: CudaBackend) -> None:
    """Numbers that are wider in one expert become as wide in all of them."""
    x = backend.place(rows_of(3, 64, torch.bfloat16))
    for scales in (["float16"] * 3, ["float16", "bfloat16", "float32"]):
        ups = [
            backend.linear(integers(4, 32, "minimums", scales=one)(32, 64, torch.bfloat16, i, None))
            for i, one in enumerate(scales)
        ]
        downs = [
            backend.linear(mxfp4(64, 16, torch.bfloat16, i, None), out_dtype=torch.float32)
            for i in range(3)
        ]
        layers = [one for one in (*ups, *downs) if isinstance(one, GroupedLinear)]
        assert len(layers) == 6
        before = [layer(x) for layer in layers[:3]]
        mixture_of(backend, (layers[:3], layers[3:]))
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=False))
        for same in (layers[:3], layers[3:]):
            runs = [run for layer in same for run in layer.runs if isinstance(run, GroupedRun)]
            numbers = [[one for one in run.numbers if one is not None] for run in runs]
            for of_all in zip(*numbers, strict=True):
                assert len({one.untyped_storage().data_ptr() for one in of_all}) == 1
                assert len({one.data_ptr() for one in of_all}) == 3


@pytest.mark.parametrize("other", ["int4 zeros", "int8 rows", "permuted", "floats"])
def test_experts_that_are_not_quantised_alike_are_refused_by_name(
    other: str, backend: CudaBackend
) -> None:
    dtype = torch.float32
    first = backend.linear(integers(4, 128)(64, 256, dtype, 0, None))
    second = (
        backend.linear(torch.ones(64, 256))
        if other == "floats"
        else backend.linear(KINDS[other](64, 256, dtype, 0, None))
    )
    downs = [backend.linear(torch.ones(256, 32), out_dtype=torch.float32)] * 2
    with pytest.raises(
        UnsupportedModelError, match=r"must be quantised alike, got .* and .*: load"
    ):
        backend.mixture(Routing(experts=2, top_k=1), [first, second], downs)
