"""Packed linear layers against float64, and bit for bit against themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.native import NativeLinear
from tests.ops.largest import assert_argmax_is_that_of_the_outputs
from tests.ops.scenarios import BACKENDS, NATIVE, REFERENCE
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Compare within the largest error of rounding after every product and sum.

    Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1. A sum of n
    rounded terms is off by at most `n * u / (1 - n * u)` times the sum of their magnitudes. A
    missing or doubled term is about 1 / K of that sum, which is far more for every K here.
    """
    roundings = (2 * x.shape[1] + 2) * 2**-24
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    limit = roundings / (1 - roundings) * size
    if y.dtype is torch.bfloat16:
        limit = limit * (1 + 2**-8) + exact.abs() * 2**-8
    error = (y.double() - exact).abs()
    assert bool((error <= limit + 1e-30).all()), f"{(error - limit).max()} beyond the limit"


@dtypes
def test_every_small_number_of_rows_is_right_on_every_instruction_set(
    isa: str, dtype: torch.dtype
) -> None:
    weight, bias = random(75, 53, dtype=dtype), random(75, dtype=dtype)
    layer = NativeLinear(weight, bias)
    for rows in range(1, 71):
        x = random(rows, 53, dtype=dtype, seed=rows)
        y = layer(x)
        assert y.dtype is dtype
        assert_close(y, x, weight, bias)


@dtypes
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [
        (1, 1),
        (33, 1),
        (1, 16),
        (31, 17),
        (32, 31),
        (64, 33),
        (129, 32),
        (257, 100),
        (96, 1029),
        (140, 600),
    ],
)
def test_sizes_that_fill_no_tile_are_right_on_every_instruction_set(
    isa: str, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight = random(out_features, in_features, dtype=dtype)
    layer = NativeLinear(weight)
    for rows in (1, 2, 5, 13, 40):
        x = random(rows, in_features, dtype=dtype)
        assert_close(layer(x), x, weight)


@settings(max_examples=examples(60))
@given(
    rows=st.integers(1, 90),
    in_features=st.integers(1, 150),
    out_features=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    wide=st.booleans(),
)
def test_any_shape_is_right(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, has_bias: bool, wide: bool
) -> None:
    weight, x = (
        random(out_features, in_features, dtype=dtype),
        random(rows, in_features, dtype=dtype),
    )
    bias = random(out_features, dtype=dtype) if has_bias else None
    y = NativeLinear(weight, bias, out_dtype=torch.float32 if wide else None)(x)
    assert y.dtype is (torch.float32 if wide else dtype)
    assert_close(y, x, weight, bias)


@dtypes
@pytest.mark.parametrize("out_features", [40, 700])
def test_a_long_prefill_is_right_with_any_number_of_threads(
    threads: None, dtype: torch.dtype, out_features: int
) -> None:
    # More rows than one pass keeps in the cache; for 40 columns also fewer panels than threads.
    weight, x = random(out_features, 700, dtype=dtype), random(1100, 700, dtype=dtype)
    layer = NativeLinear(weight)
    results = []
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        results.append(layer(x))
    assert_close(results[0], x, weight)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@dtypes
def test_a_row_gives_the_same_bits_alone_and_anywhere_in_any_batch(
    isa: str, dtype: torch.dtype
) -> None:
    layer = NativeLinear(random(150, 257, dtype=dtype), random(150, dtype=dtype))
    x = random(61, 257, dtype=dtype)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(61)])
    for first in (0, 1, 7, 30):
        for end in (first + 1, first + 2, first + 12, first + 13, 61):
            assert torch.equal(layer(x[first:end]), alone[first:end])
    assert torch.equal(layer(x.flip(0)), alone.flip(0))


@dtypes
def test_a_row_of_a_large_layer_gives_the_same_bits_in_decode_and_prefill(
    dtype: torch.dtype,
) -> None:
    layer = NativeLinear(random(1030, 512, dtype=dtype), out_dtype=torch.float32)
    x = random(1200, 512, dtype=dtype)
    y = layer(x)
    for i in (0, 1, 599, 600, 1199):
        assert torch.equal(layer(x[i : i + 1])[0], y[i])


@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(
    isa: str, dtype: torch.dtype, bad: float
) -> None:
    layer = NativeLinear(random(70, 33, dtype=dtype))
    x = random(14, 33, dtype=dtype)
    clean = layer(x)
    x[5, 32] = bad  # the last input, which has no partner in its pair
    y = layer(x)
    assert not bool(y[5].isfinite().any())
    y[5] = clean[5]
    assert torch.equal(y, clean)


def test_bfloat16_results_are_the_float32_sums_rounded_once(isa: str) -> None:
    weight, bias = random(75, 40, dtype=torch.bfloat16), random(75, dtype=torch.bfloat16)
    x = random(9, 40, dtype=torch.bfloat16)
    x[1] *= 1e37  # some results pass the largest bfloat16, some the largest float32
    x[2] *= 1e38
    x[3, 0] = float("nan")
    wide = NativeLinear(weight, bias, out_dtype=torch.float32)(x)
    narrow = NativeLinear(weight, bias)(x)
    assert torch.equal(narrow.nan_to_num(), wide.bfloat16().nan_to_num())
    assert torch.equal(narrow.isnan(), wide.isnan())
    assert bool((narrow.float() != wide).any()), "float32 results carry no more than bfloat16"


@dtypes
def test_argmax_is_the_first_of_the_largest_or_the_first_nan(isa: str, dtype: torch.dtype) -> None:
    weight, x = random(420, 64, dtype=dtype), random(45, 64, dtype=dtype)
    weight[70:350:35] = weight[3:11]  # equal outputs in other panels
    weight[201] = weight[200]
    x[7] = 0  # all are equal
    x[8, 0] = float("inf")
    x[9, 5] = float("nan")
    bias = torch.zeros(420, dtype=dtype)
    for case in ("plain", "nan", "low"):
        if case == "nan":
            bias[[33, 170, 419]] = float("nan")
        if case == "low":
            bias = torch.full((420,), -float("inf"), dtype=dtype)
        layer = NativeLinear(weight, bias, out_dtype=torch.float32)
        for rows in (1, 2, 14, 33, 45):
            assert_argmax_is_that_of_the_outputs(layer, x[-rows:])
            assert_argmax_is_that_of_the_outputs(layer, x[:rows])


@dtypes
@pytest.mark.parametrize(("rows", "out_features"), [(1, 3000), (50, 40), (300, 1500), (700, 30)])
def test_argmax_is_the_same_with_any_number_of_threads(
    threads: None, dtype: torch.dtype, rows: int, out_features: int
) -> None:
    layer = NativeLinear(random(out_features, 768, dtype=dtype), out_dtype=torch.float32)
    x = random(rows, 768, dtype=dtype)
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        assert_argmax_is_that_of_the_outputs(layer, x)


@dtypes
def test_weights_and_rows_may_be_strided(dtype: torch.dtype) -> None:
    weight, wide = random(24, 50, dtype=dtype), random(6, 100, dtype=dtype)
    x = wide[:, 10:34]
    expected = NativeLinear(weight.T.contiguous())(x.contiguous())
    assert torch.equal(NativeLinear(weight.T)(x), expected)


@dtypes
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_callers_weight_and_bias_are_not_needed_afterwards(
    dtype: torch.dtype, backend: Backend
) -> None:
    weight, bias = random(40, 30, dtype=dtype), random(40, dtype=dtype)
    x = random(3, 30, dtype=dtype)
    layer = backend.linear(weight, bias)
    before = layer(x)
    weight.zero_()
    bias.zero_()
    assert torch.equal(layer(x), before)


def test_no_rows_give_no_rows() -> None:
    assert NativeLinear(torch.ones(5, 4))(torch.ones(0, 4)).shape == (0, 5)


@dtypes
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("in_features", [1, 33, 64])
def test_rows_are_the_rows_of_the_weight(
    dtype: torch.dtype, backend: Backend, in_features: int
) -> None:
    weight = random(100, in_features, dtype=dtype)
    layer = backend.linear(weight)
    ids = torch.tensor([99, 0, 31, 32, 32, 63, 64, 5])
    assert torch.equal(layer.rows(ids), weight[ids])
    assert layer.rows(ids[:0]).shape == (0, in_features)
    for wrong in (-1, 100):
        with pytest.raises(IndexError, match="from 0 to 99"):
            layer.rows(torch.tensor([3, wrong]))


@dtypes
def test_the_reference_is_right(dtype: torch.dtype) -> None:
    weight, bias, x = (random(*s, dtype=dtype) for s in ((40, 30), (40,), (5, 30)))
    y = REFERENCE.linear(weight, bias, out_dtype=torch.float32)(x)
    assert y.dtype is torch.float32
    assert_close(y.to(dtype), x, weight, bias)


def test_a_packed_weight_takes_no_more_than_the_weight() -> None:
    assert NATIVE.linear(torch.ones(64, 10, dtype=torch.bfloat16)).num_bytes == 64 * 10 * 2


@dtypes
def test_calls_from_several_threads_do_not_mix(dtype: torch.dtype) -> None:
    layers = [NativeLinear(random(300, 256, dtype=dtype, seed=s)) for s in range(3)]
    inputs = [random(20 + s, 256, dtype=dtype) for s in range(3)]
    expected = [layer(x) for layer, x in zip(layers, inputs, strict=True)]

    def run(which: int) -> bool:
        return all(torch.equal(layers[which](inputs[which]), expected[which]) for _ in range(50))

    with ThreadPoolExecutor(3) as executor:
        assert all(executor.map(run, range(3)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"weight": torch.ones(2, 3, dtype=torch.float16)},
            TypeError,
            "weight .*got torch.float16",
        ),
        ({"weight": torch.ones(6)}, ValueError, r"weight must be of shape \[N, K\], got \[6\]"),
        ({"weight": torch.ones(0, 3)}, ValueError, r"weight .*got \[0, 3\]"),
        ({"weight": torch.ones(2, 3, device="meta")}, ValueError, "weight .*got meta"),
        ({"bias": torch.ones(3)}, ValueError, r"bias .*shape \[2\], got \[3\]"),
        ({"bias": torch.ones(2).bfloat16()}, TypeError, "bias .*float32.*got torch.bfloat16"),
        ({"out_dtype": torch.bfloat16}, TypeError, "out_dtype .*got torch.bfloat16"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(
    arguments: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NativeLinear(**{"weight": torch.ones(2, 3), **arguments})


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(4, 3).bfloat16(), TypeError, "x must be torch.float32.*got torch.bfloat16"),
        (torch.ones(4, 2), ValueError, r"x .*\[T, 3\].*got \[4, 2\]"),
        (torch.ones(3), ValueError, r"x .*got \[3\]"),
        (torch.ones(3, 4).T, ValueError, r"x .*strides \(1, 4\)"),
        (torch.ones(4, 3, device="meta"), ValueError, "x .*on meta"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    backend: Backend, x: Tensor, error: type[Exception], message: str
) -> None:
    layer = backend.linear(torch.ones(2, 3))
    with pytest.raises(error, match=message):
        layer(x)


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (torch.tensor([1], dtype=torch.int32), TypeError),
        (torch.tensor([[1]]), ValueError),
        (torch.tensor([1, 1, 1, 1])[::2], ValueError),
    ],
)
def test_ids_that_do_not_fit_are_refused(ids: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="ids must be"):
        NativeLinear(torch.ones(2, 3)).rows(ids)
