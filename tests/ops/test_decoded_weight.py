"""Weights of few bits that are multiplied as floats: results equal the floats', bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.models.quantization.packing import E4M3
from aioserve.ops.native import NativeLinear
from aioserve.ops.native_grouped import CodedWeight, joined_linear
from tests.ops.decoded_weights import (
    CODES,
    KINDS,
    NF4,
    NUMBER_CODES,
    Kind,
    of_codes,
    of_integers,
    random_weight,
)
from tests.ops.grouped_integers import Integers, random_rows
from tests.ops.largest import assert_argmax_is_that_of_the_outputs
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
few_kinds = pytest.mark.parametrize(
    "kind",
    [*CODES, (8, True, "float16"), (4, True, "zero points"), (6, False, "multiples")],
    ids=str,
)


def assert_same_bits(y: Tensor, expected: Tensor) -> None:
    assert y.dtype is expected.dtype
    assert torch.equal(y.float().view(torch.int32), expected.float().view(torch.int32))


@kinds
@dtypes
def test_every_small_number_of_rows_has_the_results_of_floats_on_every_instruction_set(
    isa: str, kind: Kind, dtype: torch.dtype
) -> None:
    for group_size, in_features in ((16, 300), (32, 301), (128, 300), (256, 640), (53, 53)):
        bias = random_rows(1, 75, dtype)[0]
        layer, floats = random_weight(75, in_features, group_size, kind).pair(dtype, bias)
        for rows in (1, 2, 3, 4, 6, 7, 13, 14, 33):
            x = random_rows(rows, in_features, dtype)
            assert_same_bits(layer(x), floats(x))


@few_kinds
@dtypes
def test_so_has_every_number_of_rows(isa: str, kind: Kind, dtype: torch.dtype) -> None:
    layer, floats = random_weight(70, 96, 32, kind).pair(dtype, None, torch.float32)
    x = random_rows(257, 96, dtype)
    for rows in [*range(1, 71), 100, 128, 257]:
        assert_same_bits(layer(x[-rows:]), floats(x[-rows:]))


@settings(max_examples=examples(120))
@given(
    rows=st.integers(1, 70),
    in_features=st.integers(1, 400),
    out_features=st.integers(1, 200),
    group_size=st.sampled_from([16, 32, 64, 128, 256, 0]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    wide=st.booleans(),
)
def test_any_shape_has_the_results_of_floats(
    rows: int,
    in_features: int,
    out_features: int,
    group_size: int,
    kind: Kind,
    dtype: torch.dtype,
    has_bias: bool,
    wide: bool,
) -> None:
    weight = random_weight(out_features, in_features, group_size or in_features, kind)
    bias = random_rows(1, out_features, dtype)[0] if has_bias else None
    layer, floats = weight.pair(dtype, bias, torch.float32 if wide else dtype)
    x = random_rows(rows, in_features, dtype)
    assert_same_bits(layer(x), floats(x))


@few_kinds
@dtypes
@pytest.mark.parametrize(("rows", "out_features"), [(1, 700), (5, 3000), (60, 40), (1100, 700)])
def test_results_are_those_of_floats_with_any_number_of_threads(
    threads: None, kind: Kind, dtype: torch.dtype, rows: int, out_features: int
) -> None:
    layer, floats = random_weight(out_features, 768, 128, kind).pair(dtype)
    x = random_rows(rows, 768, dtype)
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        assert_same_bits(layer(x), floats(x))


@kinds
@dtypes
def test_rows_are_those_of_the_floats(kind: Kind, dtype: torch.dtype) -> None:
    for group_size, in_features in ((16, 300), (64, 301), (100, 100)):
        weight = random_weight(100, in_features, group_size, kind)
        ids = torch.tensor([99, 0, 31, 32, 32, 63, 64, 5])
        rows = weight.weight(dtype).linear().rows(ids)
        assert torch.equal(rows, weight.plain(dtype)[ids])  # but for the sign of zeros


@dtypes
def test_every_code_of_e4m3_is_its_number_on_every_instruction_set(
    isa: str, dtype: torch.dtype
) -> None:
    codes = np.zeros((32, 256), np.uint8)
    codes[:, NUMBER_CODES] = NUMBER_CODES
    scales = np.ones((32, 1), np.float32)
    layer = of_codes(codes, scales, None, 256).weight(dtype).linear(torch.float32)
    expected = torch.from_numpy(E4M3[codes])
    for rows in (1, 40):
        found = torch.cat([layer(x) for x in torch.eye(256, dtype=dtype).split(rows)])
        assert torch.equal(found.T, expected)
    assert_same_bits(layer.rows(torch.arange(32)).float(), expected)


@dtypes
@pytest.mark.parametrize("power", [-149, -140, -128, -126, -120, -110, 40])
def test_weights_of_any_size_are_those_of_the_floats(
    isa: str, dtype: torch.dtype, power: int
) -> None:
    """Some instructions treat numbers below the normal ones as zeros."""
    factor = np.float32(2.0**power)
    random = np.random.default_rng(0)
    codes = random.choice(NUMBER_CODES, (64, 64))
    parts = random.uniform(0.5, 1, (64, 4)).astype(np.float32)
    values = random.integers(0, 16, codes.shape).astype(np.int8)
    minimums = -7 * parts
    weights = [
        of_codes(codes, parts * factor, None, 16),
        of_codes(codes & np.uint8(15), parts, NF4 * factor, 16),
        of_integers(Integers(values, parts * factor, minimums * factor, 16, 4)),
    ]
    for weight in weights:
        layer, floats = weight.pair(dtype, None, torch.float32)
        for rows in (1, 20):
            x = random_rows(rows, 64, dtype)
            assert_same_bits(layer(x), floats(x))
            assert_same_bits(layer(x * 2.0**30), floats(x * 2.0**30))


@few_kinds
def test_argmax_is_that_of_the_outputs(isa: str, kind: Kind) -> None:
    layer = random_weight(420, 64, 32, kind).weight(torch.bfloat16).linear(torch.float32)
    x = random_rows(45, 64, torch.bfloat16)
    x[7] = 0
    x[9, 5] = float("nan")
    for rows in (1, 2, 14, 45):
        assert_argmax_is_that_of_the_outputs(layer, x[-rows:])


@dtypes
def test_layers_may_be_joined_with_others(isa: str, dtype: torch.dtype) -> None:
    eight, four = (random_weight(40, 96, 32, kind) for kind in CODES)
    plain = NativeLinear(random_rows(20, 96, dtype))
    parts = NativeLinear(eight.plain(dtype)), plain, NativeLinear(four.plain(dtype))
    joined = joined_linear([eight.weight(dtype).linear(), plain, four.weight(dtype).linear()])
    for rows in (1, 30):
        x = random_rows(rows, 96, dtype)
        assert_same_bits(joined(x), torch.cat([part(x) for part in parts], dim=1))


def test_they_take_the_bytes_of_their_codes_and_scales() -> None:
    for kind, bits in zip(CODES, (8, 4), strict=True):
        weight = random_weight(64, 512, 128, kind).weight(torch.bfloat16)
        assert weight.native.num_bytes == 64 * 512 * bits // 8 + 64 * 4 * 4
    integers = random_weight(64, 512, 32, (4, False, "float16")).integers
    assert integers is not None
    in_floats = of_integers(integers).weight(torch.bfloat16)
    assert in_floats.native.num_bytes == integers.weight(torch.bfloat16).native.num_bytes


def test_what_is_no_code_is_refused_and_nothing_is_set() -> None:
    weight = CodedWeight(2, 32, group_size=32, dtype=torch.float32)
    scales = np.ones((2, 1), np.float32)
    values = np.full((2, 32), 56, np.int8)  # 1
    weight.set_rows(0, values, scales)
    for nan in (127, -1):
        wrong = values.copy()
        wrong[1, 7] = nan
        with pytest.raises(ValueError, match=f"values must be codes of numbers, got {nan}"):
            weight.set_rows(0, wrong * np.int8(1), scales)
    assert bool((weight.linear().rows(torch.arange(2)) == 1).all())
    four = CodedWeight(2, 32, group_size=32, numbers=NF4, dtype=torch.float32)
    with pytest.raises(ValueError, match="values must be from 0 to 15, got 16"):
        four.set_rows(0, np.full((2, 32), 16, np.int8), scales)
    with pytest.raises(ValueError, match="numbers must be finite, got nan"):
        CodedWeight(2, 32, group_size=32, numbers=NF4 * np.float32("nan"), dtype=torch.float32)
