"""Weights of integers: their products, bit for bit, on every instruction set, and their errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops.native_grouped import GroupedWeight
from tests.ops.grouped_integers import (
    KEPT,
    TABLE,
    Integers,
    Kept,
    numbers_of,
    product,
    random_integers,
    random_rows,
)
from tests.ops.largest import assert_argmax_is_that_of_the_outputs
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [(bits, has_minimums) for bits in (8, 6, 5, 4, TABLE) for has_minimums in (False, True)]
kinds = pytest.mark.parametrize(("bits", "has_minimums"), KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_same_bits(y: Tensor, expected: Tensor) -> None:
    assert y.dtype is expected.dtype
    assert torch.equal(y.float().view(torch.int32), expected.float().view(torch.int32))


IN_FILES: set[tuple[int, bool, int, Kept]] = {
    *((bits, minimums, 32, "float16") for bits in (4, 5) for minimums in (False, True)),
    *((8, False, 32, "float16"), (TABLE, False, 32, "float16"), (TABLE, False, 32, "bfloat16")),
    *((4, False, 16, "multiples"), (4, True, 16, "multiples"), (4, True, 32, "multiples")),
    *((5, True, 32, "multiples"), (6, False, 16, "multiples"), (TABLE, False, 32, "multiples")),
    *((8, False, 128, "bfloat16"), (4, False, 32, "bfloat16"), (4, False, 128, "float16")),
    *((4, True, 128, "zero points"), (8, True, 128, "zero points"), (8, False, 128, "float16")),
}
"""Kinds in GGUF, AWQ and GPTQ files, and from rounding at loading.

Each has the bits, a flag for minimums, the size of groups, and the kind of scales."""

PRODUCTS = [
    pytest.param(
        *kind,
        group,
        kept,
        marks=()
        if (i + j - k) % len(KEPT) == 0 or (*kind, group, kept) in IN_FILES
        else pytest.mark.slow,
    )
    for i, kind in enumerate(KINDS)
    for j, group in enumerate([16, 32, 64, 128, 384, 300])
    for k, kept in enumerate(KEPT)
]
"""Every pair of kind, group size and kind of scales, and all in `IN_FILES`. The rest are slow."""


@pytest.mark.parametrize(("bits", "has_minimums", "group_size", "kept"), PRODUCTS)
def test_products_are_as_stated_on_every_instruction_set(
    isa: str, bits: int, has_minimums: bool, group_size: int, kept: Kept
) -> None:
    integers = random_integers(75, 300, group_size, bits, has_minimums, kept)
    bias = random_rows(1, 75, torch.float32)[0]
    layer = integers.weight(torch.float32, bias).linear()
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 33, 70)
    xs = [random_rows(rows, 300, torch.float32) for rows in counts]
    expected = product(torch.cat(xs), integers, bias).split(counts)
    for x, y in zip(xs, expected, strict=True):
        assert_same_bits(layer(x), y)


@settings(max_examples=examples(80))
@given(
    rows=st.integers(1, 140),
    in_features=st.integers(1, 400),
    out_features=st.integers(1, 200),
    group_size=st.sampled_from([16, 32, 64, 128, 256, 0]),
    kind=st.sampled_from(KINDS),
    kept=st.sampled_from(KEPT),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    wide=st.booleans(),
)
def test_products_of_any_shape_are_as_stated(
    rows: int,
    in_features: int,
    out_features: int,
    group_size: int,
    kind: tuple[int, bool],
    kept: Kept,
    dtype: torch.dtype,
    has_bias: bool,
    wide: bool,
) -> None:
    group_size = group_size or in_features
    integers = random_integers(out_features, in_features, group_size, *kind, kept)
    bias = random_rows(1, out_features, dtype)[0] if has_bias else None
    x = random_rows(rows, in_features, dtype)
    out_dtype = torch.float32 if wide else dtype
    y = integers.weight(dtype, bias).linear(out_dtype)(x)
    assert_same_bits(y, product(x, integers, bias).to(out_dtype))


@kinds
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_errors_are_within_twice_those_of_rounding_the_activations(
    isa: str, bits: int, has_minimums: bool, group_size: int
) -> None:
    integers = random_integers(96, 640, group_size, bits, has_minimums)
    weight = integers.dequantized().astype(np.float64)
    layer = integers.weight(torch.float32).linear()
    for rows in (1, 7, 31):
        x = random_rows(rows, 640, torch.float32)
        groups = x.double().numpy().reshape(rows, -1, group_size)
        steps = np.abs(groups).max(axis=2, keepdims=True) / 127
        rounded = (np.rint(groups / steps) * steps).reshape(rows, -1)
        exact = x.double().numpy() @ weight.T
        of_rounding = np.sqrt(np.mean((rounded @ weight.T - exact) ** 2))
        error = np.sqrt(np.mean((layer(x).numpy() - exact) ** 2))
        assert 0 < error <= 2 * of_rounding


@pytest.mark.parametrize(
    ("bits", "has_minimums", "extremes"),
    [
        (8, False, [-128, 127, -127]),
        (8, True, [-128, 127]),
        (6, False, [-32, 31]),
        (6, True, [63, 0]),
        (5, False, [-16, 15]),
        (5, True, [31, 0]),
        (4, False, [-8, 7]),
        (4, True, [15, 0]),
        (TABLE, False, [-128, 127]),
        (TABLE, True, [-128, 127]),
    ],
)
@pytest.mark.parametrize("group_size", [16, 128])
def test_extreme_integers_saturate_nowhere(
    isa: str, bits: int, has_minimums: bool, extremes: list[int], group_size: int
) -> None:
    patterns = [[a, b] for a in extremes for b in extremes]
    values = np.array([(pattern * 128)[:256] for pattern in patterns], np.int8)
    scales = np.ones((len(values), 256 // group_size), np.float32)
    minimums = -scales if has_minimums else None
    integers = Integers(values, scales, minimums, group_size, bits)
    signs = [[1, 1], [1, -1], [-1, -1], [-1, 1]]
    x = torch.tensor([(sign * 128)[:256] for sign in signs] * 2).float()
    assert_same_bits(integers.weight(torch.float32).linear()(x), product(x, integers))


@kinds
@pytest.mark.parametrize("group_size", [128, 16384])
def test_the_largest_sums_of_a_long_row_overflow_nowhere(
    isa: str, bits: int, has_minimums: bool, group_size: int
) -> None:
    numbers = numbers_of(bits, has_minimums)
    low, high = numbers.min(), numbers.max()
    values = np.array([[low] * 16384, [high] * 16384, [low, high] * 8192], np.int8)
    scales = np.ones((3, 16384 // group_size), np.float32)
    integers = Integers(values, scales, -scales if has_minimums else None, group_size, bits)
    layer = integers.weight(torch.float32).linear()
    x = torch.tensor([[127.0], [-127.0], [3e30], [-3e30]]).repeat(2, 16384)
    x[4:, ::2] *= -1
    assert_same_bits(layer(x), product(x, integers))


def test_multiply_adds_are_rounded_once_on_every_instruction_set(isa: str) -> None:
    # An output is `first` plus almost half of its last place, which is a tie in float64.
    first = np.array([1 + 2.0**-23, -1 - 2.0**-23, 2.0**-127 + 2.0**-149, 1, 0])
    half = np.array([2.0**-24, -(2.0**-24), 2.0**-150, 2.0**-24, 2.0**-150])
    part = 2.0**-40  # x is smaller by that, and has the scale (1 + 2^-16) * part
    scales = np.stack([first / part, half * (1 - 2.0**-16) / part], axis=1).astype(np.float32)
    values = np.zeros((5, 32), np.int8)
    values[:, [0, 16]] = 1
    integers = Integers(values, scales, None, 16, 8)
    x = torch.zeros(3, 32)
    x[:, [0, 16]] = part
    x[:, 1], x[:, 17] = 127 * part, 127 * (1 + 2.0**-16) * part
    expected = product(x, integers)
    rounded_twice = (first + half * (1 - 2.0**-32)).astype(np.float32)
    assert list(expected[0].numpy() == rounded_twice) == [False, False, False, True, True]
    assert_same_bits(integers.weight(torch.float32).linear()(x), expected)


def test_every_byte_of_two_halves_is_unpacked_on_every_instruction_set(isa: str) -> None:
    # In a group of 32 inputs the byte that holds input i holds input i + 4 in its high half.
    values = np.zeros((256, 32), np.int8)
    for byte in range(256):
        for i in (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27):
            turned = (byte + 37 * i) % 256
            values[byte, i], values[byte, i + 4] = turned % 16, turned // 16
    ones = np.ones((256, 1), np.float32)
    for low, minimums in ((-8, None), (0, np.zeros_like(ones))):
        integers = Integers((values + low).astype(np.int8), ones, minimums, 32, 4)
        layer = integers.weight(torch.float32).linear()
        assert_same_bits(
            layer(torch.eye(32) * 127).T.contiguous(), torch.tensor(integers.values) * 127.0
        )
        assert_same_bits(layer.rows(torch.arange(256)), torch.tensor(integers.values).float())


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_every_bit_is_unpacked_where_it_lies_on_every_instruction_set(isa: str, bits: int) -> None:
    values = np.zeros((32 * bits, 32), np.uint8)
    places = np.arange(32 * bits)
    values[places, places // bits] = 1 << places % bits
    for flipped in (values, values ^ np.uint8((1 << bits) - 1)):
        least = 0 if bits < 8 else -128
        integers = Integers(
            (flipped.astype(np.int16) + least).astype(np.int8),
            np.ones((len(values), 1), np.float32),
            np.zeros((len(values), 1), np.float32),
            32,
            bits,
        )
        layer = integers.weight(torch.float32).linear()
        expected = torch.tensor(integers.values).float()
        assert_same_bits(layer(torch.eye(32) * 127).T.contiguous(), expected * 127)
        assert_same_bits(layer.rows(torch.arange(len(values))), expected)


@kinds
def test_a_row_gives_the_same_bits_alone_and_among_any_number(
    isa: str, bits: int, has_minimums: bool
) -> None:
    integers = random_integers(70, 160, 32, bits, has_minimums)
    layer = integers.weight(torch.bfloat16).linear(torch.float32)
    x = random_rows(257, 160, torch.bfloat16)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(257)])
    for rows in [*range(1, 68), 100, 128, 255, 256, 257]:
        assert_same_bits(layer(x[:rows]), alone[:rows])
        assert_same_bits(layer(x[-rows:]), alone[-rows:])
    assert_same_bits(layer(x.flip(0)), alone.flip(0))


@kinds
def test_many_rows_give_the_same_bits_with_any_number_of_threads(
    threads: None, bits: int, has_minimums: bool
) -> None:
    integers = random_integers(700, 768, 32, bits, has_minimums)
    layer = integers.weight(torch.bfloat16).linear()
    x = random_rows(1100, 768, torch.bfloat16)
    results = []
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        results.append(layer(x))
        assert_same_bits(layer(x[:1]), results[0][:1])
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@kinds
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 530, 641])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_its_neighbours_alone(
    isa: str, bits: int, has_minimums: bool, bad: float, at: int
) -> None:
    integers = random_integers(70, 642, 32, bits, has_minimums)
    layer = integers.weight(torch.bfloat16).linear()
    x = random_rows(9, 642, torch.bfloat16)
    clean = layer(x)
    x[5, at] = bad
    for rows in (slice(5, 6), slice(0, 9)):
        y = layer(x[rows])
        row = 5 - rows.start
        assert bool(y[row].isnan().all())
        y[row] = clean[5]
        assert_same_bits(y, clean[rows])


@kinds
def test_zeros_and_tiny_and_huge_numbers_are_as_stated(
    isa: str, bits: int, has_minimums: bool
) -> None:
    integers = random_integers(40, 96, 32, bits, has_minimums)
    layer = integers.weight(torch.float32).linear()
    x = random_rows(8, 96, torch.float32)
    x[0] = 0
    x[1] *= 1e-38
    x[2, :32] = 0
    x[3, 32:64] *= 1e-42  # denormal
    x[4] *= 2.0**-119 / x[4].abs().max()
    x[5] *= 1e34
    x[6, 40] = 1e35
    x[7] = -0.0
    y = layer(x)
    assert_same_bits(y, product(x, integers))
    assert bool((y[0] == 0).all())


@kinds
@dtypes
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("group_size", [16, 64, 100, 256])
def test_rows_are_the_dequantized_rows(
    bits: int, has_minimums: bool, dtype: torch.dtype, group_size: int, kept: Kept
) -> None:
    integers = random_integers(
        100, 300 if group_size != 100 else 100, group_size, bits, has_minimums, kept
    )
    layer = integers.weight(dtype).linear()
    expected = torch.from_numpy(integers.dequantized()).to(dtype)  # with the sign of zeros
    ids = torch.tensor([99, 0, 31, 32, 32, 63, 64, 5])
    assert_same_bits(layer.rows(ids), expected[ids])
    with pytest.raises(IndexError, match="from 0 to 99"):
        layer.rows(torch.tensor([3, 100]))


@kinds
def test_rows_are_set_in_any_order_by_any_thread(bits: int, has_minimums: bool) -> None:
    integers = random_integers(300, 200, 64, bits, has_minimums)
    weight = integers.empty(torch.float32)

    def set_some(begin: int) -> None:
        some = slice(begin, begin + 7)
        minimums = None if integers.minimums is None else integers.minimums[some]
        weight.set_rows(begin, integers.values[some], integers.scales[some], minimums)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(set_some, reversed(range(0, 300, 7))))
    x = random_rows(5, 200, torch.float32)
    assert_same_bits(weight.linear()(x), product(x, integers))


@kinds
def test_rows_may_be_set_again(bits: int, has_minimums: bool) -> None:
    first = random_integers(40, 64, 32, bits, has_minimums, seed=1)
    second = random_integers(40, 64, 32, bits, has_minimums, seed=2)
    weight = first.weight(torch.float32)
    weight.set_rows(0, second.values, second.scales, second.minimums)
    x = random_rows(3, 64, torch.float32)
    assert_same_bits(weight.linear()(x), product(x, second))


@kinds
def test_argmax_is_the_first_of_the_largest_or_the_first_nan(
    isa: str, bits: int, has_minimums: bool
) -> None:
    integers = random_integers(420, 64, 32, bits, has_minimums)
    integers.values[70:350:35] = integers.values[3:11]  # equal outputs in other panels
    integers.scales[70:350:35] = integers.scales[3:11]
    x = random_rows(75, 64, torch.bfloat16)
    x[7] = 0
    x[9, 5] = float("nan")
    layer = integers.weight(torch.bfloat16).linear(torch.float32)
    for rows in (1, 2, 14, 45, 75):
        assert_argmax_is_that_of_the_outputs(layer, x[-rows:])
        assert_argmax_is_that_of_the_outputs(layer, x[:rows])


@pytest.mark.parametrize(
    ("bits", "has_minimums", "group_size", "kept", "row_bytes"),
    [
        (8, False, 32, "float32", 256 + 8 * 4),
        (6, False, 16, "multiples", 192 + 4 + 16),
        (5, False, 32, "float16", 160 + 8 * 2),
        (4, False, 128, "float32", 128 + 2 * 4),
        (4, True, 16, "float32", 128 + 16 * 8),
        (4, False, 32, "float16", 128 + 8 * 2),
        (4, True, 32, "multiples", 128 + 8 + 8 * 2),
        (8, False, 16, "multiples", 256 + 4 + 16),
        (4, False, 32, "bfloat16", 128 + 8 * 2),
        (TABLE, False, 32, "float16", 128 + 8 * 2),
        (4, True, 64, "zero points", 128 + 4 * 3),
        (4, True, 128, "zero points", 128 + 2 * 3),
    ],
)
def test_a_weight_takes_its_bits_and_its_parameters(
    bits: int, has_minimums: bool, group_size: int, kept: Kept, row_bytes: int
) -> None:
    integers = random_integers(64, 256, group_size, bits, has_minimums, kept)
    assert integers.empty(torch.float32).linear().num_bytes == 64 * row_bytes


@pytest.mark.parametrize("sign", [1, -1])
def test_scales_of_any_sign_and_range_are_kept_as_multiples(isa: str, sign: int) -> None:
    # Multiples of 16 groups have the whole range of int8. Numbers include zero and subnormals.
    multiples = np.array([-128, 127, 0, 1, -1, 64, -64, 3, *range(8)], np.float32)
    numbers = sign * np.array([2.0**-14, 1.4140625, 3e-41, 0, 65504, 2.0**-24], np.float32)
    scales = numbers[:, None] * multiples
    values = np.tile(np.arange(-128, 128), (6, 1)).astype(np.int8)
    integers = Integers(values, scales, None, 16, 8, "multiples")
    layer = integers.weight(torch.float32).linear()
    x = random_rows(5, 256, torch.float32)
    assert_same_bits(layer(x), product(x, integers))
    assert_same_bits(layer.rows(torch.arange(6)), torch.from_numpy(integers.dequantized()))


def test_small_and_negative_scales_are_kept_as_float16(isa: str) -> None:
    scales = np.array([[2.0**-24], [-(2.0**-15)], [65504], [-0.0], [1 / 1024]], np.float32)
    values = np.tile(np.arange(-8, 8), (5, 1)).astype(np.int8)
    integers = Integers(values, scales, None, 16, 4, "float16")
    layer = integers.weight(torch.float32).linear()
    x = random_rows(5, 16, torch.float32)
    assert_same_bits(layer(x), product(x, integers))
    assert_same_bits(layer.rows(torch.arange(5)), torch.from_numpy(integers.dequantized()))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ("float16", "{} must be numbers of float16, got"),
        ("bfloat16", "{} must be numbers of bfloat16, got"),
        ("multiples", "{} must be multiples, by -128 to 127, of one number for 256 inputs"),
    ],
)
@pytest.mark.parametrize("bad", [1.0001, 1.23e9, 1.23e-9, float("nan"), float("inf")])
def test_scales_that_would_not_be_kept_exactly_are_refused(
    kept: Kept, message: str, bad: float
) -> None:
    integers = random_integers(9, 256, 32, 4, True, kept)
    weight = integers.empty(torch.float32)
    assert integers.minimums is not None
    for name, parameters in (("minimums", integers.minimums), ("scales", integers.scales)):
        good = parameters[8, 2]
        parameters[8, 2] = bad
        with pytest.raises(ValueError, match=message.format(name)):
            weight.set_rows(0, integers.values, integers.scales, integers.minimums)
        parameters[8, 2] = good
    assert not bool(weight.linear().rows(torch.arange(9)).any())


def test_values_that_are_not_in_the_table_are_refused() -> None:
    integers = random_integers(9, 256, 32, TABLE, False)
    weight = integers.empty(torch.float32)
    integers.values[8, 200] = 2
    with pytest.raises(ValueError, match="values must be in the table, got 2"):
        weight.set_rows(0, integers.values, integers.scales)
    assert not bool(weight.linear().rows(torch.arange(9)).any())


@pytest.mark.parametrize("bad", [0.5, -129.0, 128.0, float("nan"), float("inf")])
def test_minimums_that_are_no_zero_points_are_refused(bad: float) -> None:
    integers = random_integers(9, 256, 32, 4, True, "zero points")
    weight = integers.empty(torch.float32)
    assert integers.minimums is not None
    integers.scales[8, 2] = 1
    integers.minimums[8, 2] = -bad
    with pytest.raises(ValueError, match=r"minimums must be -\(zero point \* scale\)"):
        weight.set_rows(0, integers.values, integers.scales, integers.minimums)
    assert not bool(weight.linear().rows(torch.arange(9)).any())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"out_features": 0}, ValueError, "out_features must be at least 1, got 0"),
        ({"in_features": 0}, ValueError, "in_features must be at least 1, got 0"),
        ({"group_size": 48}, ValueError, "group_size must be 16, 32, 64, .* got 48"),
        ({"group_size": 0}, ValueError, "group_size must be .* got 0"),
        ({"bits": 7}, ValueError, "bits must be 4, 5, 6 or 8, got 7"),
        ({"bits": 5, "table": range(16)}, ValueError, "bits must be 4 with a table, got 5"),
        ({"table": range(15)}, ValueError, "table must have 16 bytes, or none"),
        ({"scales": "float8"}, ValueError, "scales must be float32, float16, bfloat16 or mult"),
        ({"has_zero_points": True}, ValueError, "has_zero_points must be false without minimums"),
        (
            {"has_zero_points": True, "has_minimums": True, "scales": "multiples"},
            ValueError,
            "has_zero_points must be false .* where scales are multiples",
        ),
        ({"dtype": torch.float16}, TypeError, "dtype must be float32 or bfloat16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    changed: dict, error: type[Exception], message: str
) -> None:
    sizes = {"out_features": 8, "in_features": 64, "group_size": 32, "bits": 4}
    with pytest.raises(error, match=message):
        GroupedWeight(**{**sizes, "dtype": torch.float32, **changed})


VALUES = np.zeros((2, 64), np.int8)
SCALES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((7, VALUES, SCALES), IndexError, "rows must be from 0 to 7, got 2 from 7 on"),
        ((-1, VALUES, SCALES), IndexError, "rows must be from 0 to 7"),
        ((0, VALUES + np.int8(8), SCALES), ValueError, "values must be from -8 to 7, got 8"),
        ((0, VALUES - np.int8(9), SCALES), ValueError, "values must be from -8 to 7, got -9"),
        ((0, VALUES[:, :32], SCALES), ValueError, r"values must be contiguous of shape \[2, 64\]"),
        ((0, VALUES[0], SCALES), ValueError, r"values must be of shape \[n, in_features\]"),
        ((0, VALUES.astype(np.int16), SCALES), TypeError, "values must be int8, got int16"),
        ((0, VALUES, SCALES[:, :1]), ValueError, "scales must be contiguous"),
        ((0, VALUES, SCALES.astype(np.float64)), TypeError, "scales must be float32"),
        ((0, VALUES, SCALES, SCALES), ValueError, "minimums must be None"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    arguments: tuple, error: type[Exception], message: str
) -> None:
    weight = GroupedWeight(8, 64, group_size=32, bits=4, dtype=torch.float32)
    with pytest.raises(error, match=message):
        weight.set_rows(*arguments)
    assert not bool(weight.linear().rows(torch.arange(8)).any())


def test_minimums_and_bias_that_do_not_fit_are_refused() -> None:
    weight = GroupedWeight(8, 64, group_size=32, bits=4, has_minimums=True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="minimums must be given"):
        weight.set_rows(0, VALUES, SCALES)
    with pytest.raises(ValueError, match="minimums must be contiguous"):
        weight.set_rows(0, VALUES, SCALES, SCALES[:1])
    with pytest.raises(ValueError, match="values must be from 0 to 15, got -1"):
        weight.set_rows(0, VALUES - np.int8(1), SCALES, SCALES)
    with pytest.raises(TypeError, match=r"bias must be torch\.bfloat16"):
        weight.set_bias(torch.ones(8))
    with pytest.raises(ValueError, match=r"bias .* shape \[8\]"):
        weight.set_bias(torch.ones(9).bfloat16())
