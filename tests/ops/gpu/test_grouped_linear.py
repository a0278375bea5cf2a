"""Linear layers of integers on the GPU: their products, and the same bits of a row in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.errors import WeightsError
from aioserve.formats.weights import CUDA, GroupedRows
from aioserve.models.stored import Floats
from aioserve.models.weight_integers import WeightIntegers
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.grouped_linear import GroupedLinear, parts_of
from tests.ops.gpu.held import exact, held, random_integers
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest, round_fused_products_once
from tests.ops.grouped_integers import Integers, product, random_rows
from tests.ops.scenarios import REFERENCE
from tests.tiers import examples

round_bfloat16_to_nearest()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
KINDS = ["plain", "zeros", "unsigned zeros", "minimums"]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def fused_products_are_rounded_once() -> Iterator[None]:
    with round_fused_products_once():
        yield


def layer(
    backend: CudaBackend,
    weight: WeightIntegers,
    dtype: torch.dtype,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    *,
    integer_activations: bool = False,
) -> GroupedLinear:
    made = backend.linear(
        held([weight], dtype, bias, rounded_activations=integer_activations), out_dtype=out_dtype
    )
    assert isinstance(made, GroupedLinear)
    return made


def check(found: Tensor, x: Tensor, weight: WeightIntegers | Floats, bias: Any = None) -> None:
    """Compare within sums in float32 and one rounding. Large results are infinite in float16."""
    dense = weight if isinstance(weight, np.ndarray) else weight.dequantized()
    expected, size = exact(x, dense, bias)
    allowed = 2e-6 * size + (0 if found.dtype is torch.float32 else ROUNDING[found.dtype]) * (
        expected.abs() + 1e-6
    )
    if found.dtype is torch.float16:
        allowed = allowed + 2.0**-25  # half a step of the smallest
    got = found.cpu().double()
    fits = expected.abs() < torch.finfo(found.dtype).max / 2
    assert ((got - expected).abs() <= allowed)[fits].all()


def a_bias(count: int) -> np.ndarray:
    return (np.arange(count, dtype=np.float32) - 7) / 4


SIZES = [(4, 16, 40), (4, 32, 256), (4, 128, 330), (4, 330, 330), (8, 16, 48), (8, 300, 300)]
PRODUCTS = [
    pytest.param(dtype, *size, kind, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
    for i, dtype in enumerate(DTYPES)
    for j, size in enumerate(SIZES)
    for k, kind in enumerate(KINDS)
]
"""Every pair of dtype, sizes and kind. The rest are slow."""


@pytest.mark.parametrize(("dtype", "bits", "group_size", "in_features", "kind"), PRODUCTS)
def test_products_are_those_of_the_dequantised_weight(
    backend: CudaBackend,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    in_features: int,
    kind: str,
) -> None:
    weight = random_integers(70, in_features, group_size, bits, kind)
    bias = a_bias(70) if group_size != 32 else None
    x = random_rows(17, in_features, dtype)
    for out_dtype in (None, torch.float32):
        found = layer(backend, weight, dtype, bias, out_dtype)(backend.place(x))
        assert found.dtype is (out_dtype or dtype)
        check(found, x, weight, bias)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 64, 65, 257])
def test_any_number_of_rows_agrees(backend: CudaBackend, rows: int) -> None:
    weight = random_integers(130, 640, 32, 4, "minimums", scales="float32")
    x = random_rows(rows, 640, torch.bfloat16)
    made = layer(backend, weight, torch.bfloat16, out_dtype=torch.float32)
    check(made(backend.place(x)), x, weight)


@given(
    rows=st.integers(0, 20),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 700),
    group=st.sampled_from([16, 32, 64, 128, 0]),
    bits=st.sampled_from([4, 8]),
    kind=st.sampled_from(KINDS),
    scales=st.sampled_from(["float16", "bfloat16", "float32"]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(25))
def test_any_shape_agrees(
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
    bits: int,
    kind: str,
    scales: str,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    backend = CudaBackend("cuda" if torch.cuda.is_available() else "cpu")
    weight = random_integers(outputs, inputs, group or inputs, bits, kind, scales=scales, seed=seed)
    bias = a_bias(outputs) if has_bias else None
    x = random_rows(rows, inputs, dtype, seed)
    # A layer may be given rows of a wider tensor.
    wide = torch.zeros(rows, inputs + 5, dtype=dtype)
    wide[:, :inputs] = x
    made = layer(backend, weight, dtype, bias)
    check(made(backend.place(wide)[:, :inputs]), x, weight, bias)
    if rows:
        ids = torch.arange(rows) * 7 % outputs
        expected = torch.from_numpy(weight.dequantized()).to(dtype)[ids]
        assert torch.equal(made.rows(backend.place(ids)).cpu(), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("integer_activations", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize(
    ("bits", "kind", "group_size", "in_features", "dtype"),
    [
        (4, "plain", 32, 1024, torch.bfloat16),
        (4, "minimums", 64, 600, torch.float16),
        (8, "plain", 2048, 2048, torch.bfloat16),
        (8, "zeros", 128, 1500, torch.bfloat16),
        (4, "minimums", 64, 320, torch.float32),
    ],
)
def test_a_row_is_the_same_to_the_last_bit_in_any_batch(
    backend: CudaBackend,
    bits: int,
    kind: str,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
    integer_activations: bool,
) -> None:
    weight = random_integers(40, in_features, group_size, bits, kind, scales="float32")
    made = layer(
        backend,
        weight,
        dtype,
        out_dtype=torch.float32,
        integer_activations=integer_activations,
    )
    x = backend.place(random_rows(129 if integer_activations else 257, in_features, dtype))
    together = made(x)
    for first, count in ((128, 1), (100, 7), (3, 16), (40, 17), (7, 64)):
        alone = made(x[first : first + count])
        assert torch.equal(alone, together[first : first + count]), (first, count)


@pytest.mark.usefixtures("fused_products_are_rounded_once")
@pytest.mark.parametrize("kind", ["plain", "minimums"])
@pytest.mark.parametrize(
    ("bits", "group_size", "in_features"),
    [(4, 32, 96), (4, 64, 250), (4, 128, 1300), (8, 32, 224), (8, 300, 300), (8, 128, 2048)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integer_activations_give_the_bits_of_the_cpus_part_by_part(
    backend: CudaBackend,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    in_features: int,
    kind: str,
) -> None:
    """Expected results are from `product`, as in `native/linear/grouped/tile.h`."""
    weight = random_integers(50, in_features, group_size, bits, kind, scales="float32")
    x = random_rows(9, in_features, dtype)
    x[2] = 0
    x[3, :40] *= 2.0**-126
    bias = a_bias(50)
    made = layer(backend, weight, dtype, bias, torch.float32, integer_activations=True)
    chunk = group_size if group_size in (32, 64, 128) else 128
    part = chunk * parts_of(50, -(-in_features // chunk), chunk)
    expected = torch.zeros(9, 50)
    for first in range(0, in_features, part):
        end = min(first + part, in_features)
        own_group = group_size if group_size < in_features else end - first
        groups = slice(first // group_size, -(-end // group_size))
        own = Integers(
            weight.values[:, first:end],
            weight.scales[:, groups],
            None if weight.minimums is None else weight.minimums[:, groups],
            own_group,
            bits,
        )
        expected += product(x[:, first:end], own)
    assert torch.equal(made(backend.place(x)).cpu(), expected + torch.from_numpy(bias))


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_activations_with_zeros_are_as_near_as_rounding_lets_them(
    backend: CudaBackend, bits: int
) -> None:
    weight = random_integers(50, 640, 64, bits, "zeros")
    x = random_rows(9, 640, torch.float32)
    made = layer(backend, weight, torch.float32, integer_activations=True)
    dequantized = torch.from_numpy(weight.dequantized()).double()
    steps = x.view(9, 10, 64).abs().amax(2).double() / 254
    sizes = dequantized.abs().view(50, 10, 64).sum(2)
    error = made(backend.place(x)).cpu().double() - x.double() @ dequantized.T
    assert (error.abs() <= 1.001 * steps @ sizes.T + 1e-4).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_numbers_is_nan_and_disturbs_no_other(
    backend: CudaBackend, bad: float
) -> None:
    weight = random_integers(40, 200, 200, 8)
    x = random_rows(3, 200, torch.float32)
    made = layer(backend, weight, torch.float32, integer_activations=True)
    before = made(backend.place(x))
    x[1, 77] = bad
    after = made(backend.place(x))
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.more
def test_extreme_integers_are_exact(backend: CudaBackend) -> None:
    """Weights have every 4-bit value in each half of a byte, and the ends of 8 bits with zeros."""
    for bits, low, high in ((4, -8, 7), (8, -128, 127)):
        count = 1 << bits
        values = np.array([np.roll(np.arange(low, high + 1), -i) for i in range(count)], np.int8)
        values = np.tile(values, (1, 32 // count or 1))
        shape = count, values.shape[1] // 32
        zeros = np.full(shape, low if bits == 8 else high, np.int8)
        scales = np.ones(shape, np.float32)
        for own_zeros in (None, zeros):
            weight = WeightIntegers(values, scales, own_zeros, None, 32, bits)
            for dtype in DTYPES:
                x = torch.eye(values.shape[1], dtype=dtype)
                found = layer(backend, weight, dtype, out_dtype=torch.float32)(backend.place(x))
                assert torch.equal(found.cpu(), torch.from_numpy(weight.dequantized()).T)


def test_runs_of_several_forms_are_one_layer(backend: CudaBackend) -> None:
    x = random_rows(5, 96, torch.float32)
    weights = [
        random_integers(40, 96, 32, 4),
        random_integers(8, 96, 32, 4, seed=1),
        np.random.default_rng(0).standard_normal((24, 96)).astype(np.float32),
        random_integers(30, 96, 96, 8, "zeros"),
        random_integers(10, 96, 16, 8, "minimums"),
    ]
    bias = a_bias(112)
    joined = held(weights, torch.float32, bias)
    assert [run.out_features for run in joined.runs] == [48, 24, 30, 10]
    made = backend.linear(joined)
    dense = np.concatenate(
        [one.dequantized() if isinstance(one, WeightIntegers) else one for one in weights]
    )
    expected, size = exact(x, dense, bias)
    error = (made(backend.place(x)).cpu().double() - expected).abs()
    assert (error <= 2e-6 * size).all()
    ids = torch.tensor([0, 39, 40, 47, 48, 71, 72, 101, 102, 111])
    assert torch.equal(made.rows(backend.place(ids)).cpu(), torch.from_numpy(dense)[ids])


def test_scales_take_two_bytes_where_those_hold_them() -> None:
    for scales, dtype in (("float16", np.float16), ("bfloat16", np.int16), ("float32", np.float32)):
        weight = random_integers(64, 256, 32, 4, "minimums", scales=scales)
        run = held([weight], torch.bfloat16).runs[0]
        assert isinstance(run, GroupedRows)
        assert run.values.nbytes == 64 * 128
        assert run.scales.dtype == dtype
        assert run.minimums is not None
        assert run.minimums.dtype == dtype


@pytest.mark.parametrize(("bits", "kind"), [(5, "plain"), (6, "plain"), (5, "minimums")])
def test_five_and_six_bits_are_held_in_eight(backend: CudaBackend, bits: int, kind: str) -> None:
    weight = random_integers(40, 96, 32, bits, kind)
    x = random_rows(3, 96, torch.float32)
    made = layer(backend, weight, torch.float32)
    assert made.num_bytes == 40 * (96 + 3 * 2 * (1 + (kind == "minimums")))
    check(made(backend.place(x)), x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_of_a_table_are_held_in_four_bits_and_exact(
    backend: CudaBackend, dtype: torch.dtype
) -> None:
    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    plain = random_integers(40, 96, 32, 8)
    values = np.array(table, np.int8)[plain.values.view(np.uint8) & 15]
    weight = WeightIntegers(values, plain.scales, None, None, 32, 4, table)
    made = layer(backend, weight, dtype, out_dtype=torch.float32)
    x = random_rows(3, 96, dtype)
    check(made(backend.place(x)), x, weight)
    assert made.num_bytes == 40 * (48 + 3 * 2) + 64
    ids = torch.arange(40)
    expected = torch.from_numpy(weight.dequantized()).to(dtype)
    assert torch.equal(made.rows(backend.place(ids)).cpu(), expected)
    # Integers of 8 bits with the same scales have the same bits.
    eight = layer(
        backend,
        WeightIntegers(values, plain.scales, None, None, 32, 8),
        dtype,
        None,
        torch.float32,
    )
    assert torch.equal(eight(backend.place(x)), made(backend.place(x)))


def test_rows_stay_floats_where_no_activation_may_be_rounded() -> None:
    never = msgspec.structs.replace(CUDA, integer_activations=False)
    weight = random_integers(4, 64, 32, 8)
    for formats, rounds in ((CUDA, True), (never, False)):
        run = held([weight], torch.bfloat16, rounded_activations=True, formats=formats).runs[0]
        assert isinstance(run, GroupedRows)
        assert run.rounded_activations is rounds


def test_bytes_of_four_bits_are_a_quarter_of_bfloat16(backend: CudaBackend) -> None:
    made = layer(backend, random_integers(128, 1024, 128, 4), torch.bfloat16)
    assert made.num_bytes == 128 * 512 + 128 * 8 * 2


def test_values_beyond_four_bits_are_refused_by_name() -> None:
    weight = random_integers(4, 64, 32, 4, "minimums")
    unsigned = WeightIntegers(weight.values, weight.scales, None, None, 32, 4)
    with pytest.raises(WeightsError, match=r"must be within \[-8, 7\].*got 0 to 15"):
        held([unsigned], torch.float32)


def test_what_does_not_fit_is_refused_by_name(backend: CudaBackend) -> None:
    made = layer(backend, random_integers(4, 64, 32, 4), torch.bfloat16)
    with pytest.raises(TypeError, match=r"x must be torch.bfloat16 as the weight, got torch.float"):
        made(backend.place(torch.zeros(1, 64)))
    with pytest.raises(ValueError, match=r"x must be of shape \[T, 64\] with dense rows"):
        made(backend.place(torch.zeros(1, 65, dtype=torch.bfloat16)))
    weight = held([random_integers(4, 64, 32, 4)], torch.bfloat16)
    with pytest.raises(TypeError, match="bias must be None: it is held with the weight"):
        backend.linear(weight, torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"out_dtype must be torch.bfloat16 or"):
        backend.linear(weight, out_dtype=torch.float16)
    with pytest.raises(TypeError, match="the backend reference computes no PackedLinear"):
        REFERENCE.linear(weight)
    assert CUDA.integer_bits == (4, 8)


def test_parts_depend_on_the_shape_alone_and_fill_a_device() -> None:
    assert parts_of(4096, 32, 128) == 8
    assert parts_of(1024, 32, 128) == 2
    assert parts_of(28_672, 32, 128) == 32
    assert parts_of(64, 3, 128) == 2, "no part has fewer than 256 inputs but the last"
