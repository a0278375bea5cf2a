"""Experts of the GPU against the reference, and rows with the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.formats.routing import Routing
from aioserve.models.loader import load_model
from aioserve.ops.experts import ExpertGate, Mixture, Routes
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.reference import TorchLinear
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.test_experts import GATES, REFERENCE, routes_of, rows_of, weights_of
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import write
from tests.tiers import examples

round_bfloat16_to_nearest()

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def backend(device: torch.device) -> CudaBackend:
    return CudaBackend(device)


def mixture_of(
    backend: CudaBackend,
    weights: tuple[list[Tensor], list[Tensor]],
    gate: ExpertGate = "silu",
    biases: tuple[list[Tensor], list[Tensor]] | None = None,
) -> tuple[Mixture, Mixture]:
    """Make the mixture of the backend, and that of the reference."""
    (ups, downs), count = weights, len(weights[0])
    up_biases, down_biases = biases or ([None] * count, [None] * count)
    found = [
        one.mixture(
            Routing(experts=count, top_k=1),
            [one.linear(up, bias) for up, bias in zip(ups, up_biases, strict=True)],
            [
                one.linear(down, bias, out_dtype=torch.float32)
                for down, bias in zip(downs, down_biases, strict=True)
            ],
            gate=gate,
        )
        for one in (backend, REFERENCE)
    ]
    return found[0], found[1]


def placed(backend: CudaBackend, routes: Routes) -> Routes:
    return Routes(*map(backend.place, routes))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(12))
@given(
    rows=st.integers(0, 40),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 3),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 40),
    gate=st.sampled_from(GATES),
    has_biases=st.booleans(),
    holes=st.booleans(),
)
def test_rows_have_the_sums_of_the_reference(
    rows: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    gate: ExpertGate,
    has_biases: bool,
    holes: bool,
    dtype: torch.dtype,
    backend: CudaBackend,
) -> None:
    weights = weights_of(experts, hidden, inner, dtype)
    biases = None
    if has_biases:
        biases = (
            [*rows_of(experts, 2 * inner, dtype, seed=7)],
            [*rows_of(experts, hidden, dtype, seed=8)],
        )
    ours, reference = mixture_of(backend, weights, gate, biases)
    x, routes = (
        rows_of(rows, hidden, dtype),
        routes_of(rows, experts, min(top_k, experts), holes=holes),
    )

    y = ours(backend.place(x), placed(backend, routes))

    assert y.dtype is dtype
    tolerance = 2e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(y.cpu(), reference(x, routes), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    dtype: torch.dtype, backend: CudaBackend
) -> None:
    """An expert has more rows than a block: alone, in another order, and with padding."""
    mixture, _ = mixture_of(backend, weights_of(5, 48, 32, dtype))
    x, routes = backend.place(rows_of(45, 48, dtype)), placed(backend, routes_of(45, 5, 2))
    whole = mixture(x, routes)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(3)).to(x.device)

    def of(rows: Tensor) -> Tensor:
        return mixture(x[rows], Routes(routes.ids[rows], routes.weights[rows]))

    assert torch.equal(of(order), whole[order])
    assert torch.equal(of(order[:17]), whole[order[:17]])
    for row in (0, 31, 44):
        assert torch.equal(of(torch.tensor([row])), whole[[row]])
    nothing = torch.full((4, 48), float("nan"), dtype=dtype, device=x.device)
    padding = Routes(
        torch.full((4, 2), -1, dtype=torch.int32, device=x.device),
        torch.full((4, 2), float("nan"), device=x.device),
    )
    padded = Routes(*(torch.cat(both) for both in zip(routes, padding, strict=True)))
    y = mixture(torch.cat([x, nothing]), padded)
    assert torch.equal(y[:45], whole)
    assert (y[45:] == 0).all()
    assert (mixture(nothing, padding) == 0).all()


def test_the_weights_are_held_once(backend: CudaBackend) -> None:
    ups, downs = weights_of(3, 16, 8, torch.float32)
    layers = [one for one in map(backend.linear, ups) if isinstance(one, TorchLinear)]
    assert len(layers) == 3
    last = [backend.linear(down, out_dtype=torch.float32) for down in downs]
    backend.mixture(Routing(experts=3, top_k=1), layers, last)
    x = backend.place(rows_of(2, 16, torch.float32))
    memory = {layer._weight.untyped_storage().data_ptr() for layer in layers}
    assert len(memory) == 1
    for layer, up in zip(layers, ups, strict=True):
        torch.testing.assert_close(layer(x).cpu(), x.cpu() @ up.T)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_a_model_has_the_logits_of_the_reference(
    name: str, tmp_path: Path, backend: CudaBackend
) -> None:
    model = write(name, tmp_path)
    ids = list(range(4, 40, 3))
    ours, expected = (
        PagedRun(load_model(model, dtype="float32", backend=one)).step({"a": ids})["a"]
        for one in (backend, REFERENCE)
    )
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-4)
