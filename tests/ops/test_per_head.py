"""Products of each head with a weight of its own, against float64, and bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.native_types import NativeLinear
from tests.ops.scenarios import BACKENDS, DTYPES, NATIVE, random

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
# (heads, outputs, inputs, passed)
SIZES = [(1, 1, 1, 0), (3, 40, 17, 0), (5, 33, 64, 6), (16, 128, 32, 3)]


def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1))


@backends
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_head_is_multiplied_by_its_own_weight(
    backend: Backend, dtype: torch.dtype, rows: int, sizes: tuple[int, int, int, int]
) -> None:
    heads, outputs, inputs, passed = sizes
    weight = random(heads, inputs, outputs, dtype=dtype, seed=1).transpose(1, 2)
    layer = backend.per_head(weight, passed)
    x = random(rows, 2 * layer.in_columns, dtype=dtype, seed=2)[:, : layer.in_columns]

    y = layer(x)

    assert y.shape == (rows, layer.out_columns)
    assert y.dtype is dtype
    given, got = by_heads(x, heads), by_heads(y, heads)
    expected = torch.einsum("thk,hnk->thn", given[..., :inputs].double(), weight.double())
    limit = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got[..., :outputs].double(), expected, rtol=limit, atol=limit)
    assert torch.equal(got[..., outputs:], given[..., inputs:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_has_the_bits_of_a_linear_layer_whatever_the_rows_and_threads(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    heads, outputs, inputs, passed = 3, 70, 65, 4
    weight = random(heads, outputs, inputs, dtype=dtype, seed=3)
    layer = NATIVE.per_head(weight, passed)
    x = random(200, layer.in_columns, dtype=dtype, seed=4)
    given = by_heads(x, heads)
    alone = [NativeLinear(weight[head])(given[:, head, :inputs]) for head in range(heads)]
    for count in (1, 2, 7):
        _native.set_num_threads(count)
        for rows in (slice(0, 200), slice(3, 4), slice(5, 70)):
            got = by_heads(layer(x[rows]), heads)
            for head in range(heads):
                assert torch.equal(got[:, head, :outputs], alone[head][rows]), (count, rows)


@backends
def test_what_does_not_fit_is_refused_by_name(backend: Backend) -> None:
    layer = backend.per_head(torch.zeros(2, 3, 4), 1)
    with pytest.raises(ValueError, match="x must be of shape \\[T, 10\\]"):
        layer(torch.zeros(2, 9))
    with pytest.raises(TypeError, match=r"x must be torch\.float32"):
        layer(torch.zeros(2, 10, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="weight must be of shape"):
        backend.per_head(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="passed must be at least 0"):
        backend.per_head(torch.zeros(2, 3, 4), -1)
