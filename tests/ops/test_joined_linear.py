"""Joined layers give the bits of their parts, one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops.native import NativeLinear
from aioserve.ops.native_grouped import joined_linear
from tests.ops.grouped_integers import random_integers, random_rows
from tests.ops.largest import assert_argmax_is_that_of_the_outputs
from tests.tiers import examples

IN_FEATURES = 96


def layer(kind: int, out_features: int, dtype: torch.dtype, out: torch.dtype) -> NativeLinear:
    if kind == 0:
        return NativeLinear(random_rows(out_features, IN_FEATURES, dtype) / 10, out_dtype=out)
    bits, has_minimums = [(8, False), (4, False), (4, True), (5, True), (6, False)][kind - 1]
    integers = random_integers(out_features, IN_FEATURES, 8 << kind, bits, has_minimums, seed=kind)
    return integers.weight(dtype, random_rows(1, out_features, dtype, seed=kind)[0]).linear(out)


def outputs(layers: list[NativeLinear], x: Tensor) -> Tensor:
    return torch.cat([part(x) for part in layers], dim=1)


@settings(max_examples=examples(60))
@given(
    parts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 70)), min_size=1, max_size=4),
    rows=st.integers(0, 140),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wide=st.booleans(),
)
def test_outputs_are_those_of_the_parts(
    parts: list[tuple[int, int]], rows: int, dtype: torch.dtype, wide: bool
) -> None:
    out_dtype = torch.float32 if wide else dtype
    layers = [layer(*part, dtype, out_dtype) for part in parts]
    joined = joined_linear(layers, out_dtype)
    x = random_rows(rows, IN_FEATURES, dtype)
    y = joined(x)
    assert y.dtype is out_dtype
    assert torch.equal(y, outputs(layers, x))
    assert joined.num_bytes == sum(part.num_bytes for part in layers)


def test_integers_have_the_same_outputs_on_every_instruction_set_in_any_number_of_rows(
    isa: str,
) -> None:
    layers = [layer(kind, 30 + kind, torch.bfloat16, torch.float32) for kind in (1, 2, 3, 4, 5)]
    joined, x = joined_linear(layers, torch.float32), random_rows(257, IN_FEATURES, torch.bfloat16)
    _native.set_isa("portable")
    expected = torch.cat([joined(x[row : row + 1]) for row in range(257)])
    _native.set_isa(isa)
    for rows in (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 70, 257):
        assert torch.equal(joined(x[:rows]), expected[:rows])


def test_outputs_are_those_of_the_parts_with_any_number_of_threads(threads: None) -> None:
    layers = [layer(kind, 500 + kind, torch.bfloat16, torch.bfloat16) for kind in range(4)]
    joined, x = joined_linear(layers), random_rows(300, IN_FEATURES, torch.bfloat16)
    expected = outputs(layers, x)
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        assert torch.equal(joined(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_is_the_first_of_the_largest_or_the_first_nan(dtype: torch.dtype) -> None:
    layers = [layer(kind, 40 + kind, dtype, torch.float32) for kind in (1, 0, 3, 2)]
    twice = [*layers, *layers]  # equal outputs in two parts
    x = random_rows(45, IN_FEATURES, dtype)
    x[7] = 0
    x[9, 5] = float("nan")
    for some in (layers, twice, layers[:1]):
        joined = joined_linear(some, torch.float32)
        for rows in (1, 2, 14, 45):
            assert_argmax_is_that_of_the_outputs(joined, x[-rows:])
            assert_argmax_is_that_of_the_outputs(joined, x[:rows])


def test_nan_of_a_later_part_is_the_largest() -> None:
    bias = torch.zeros(40)
    bias[3] = float("nan")
    plain = NativeLinear(torch.ones(40, 8), torch.full((40,), 9.0))
    joined = joined_linear([plain, NativeLinear(torch.ones(40, 8), bias), plain])
    assert_argmax_is_that_of_the_outputs(joined, torch.ones(5, 8))


def test_rows_are_the_rows_of_the_parts() -> None:
    layers = [layer(kind, 30 + kind, torch.bfloat16, torch.bfloat16) for kind in range(4)]
    joined = joined_linear(layers)
    expected = torch.cat([part.rows(torch.arange(part.out_features)) for part in layers])
    ids = torch.tensor([125, 0, 29, 30, 60, 61, 92, 93])
    assert torch.equal(joined.rows(ids), expected[ids])
    with pytest.raises(IndexError, match="from 0 to 125"):
        joined.rows(torch.tensor([126]))


def test_parts_live_as_long_as_the_whole() -> None:
    x = random_rows(3, IN_FEATURES, torch.float32)
    layers = [layer(kind, 30, torch.float32, torch.float32) for kind in (0, 2)]
    expected, joined = outputs(layers, x), joined_linear(layers)
    layers.clear()
    assert torch.equal(joined(x), expected)


def test_parts_that_do_not_fit_are_refused() -> None:
    wide, narrow = NativeLinear(torch.ones(4, 8)), NativeLinear(torch.ones(4, 7))
    with pytest.raises(ValueError, match="at least one"):
        joined_linear([])
    with pytest.raises(ValueError, match="same dtype and in_features, got 7 beside 8"):
        joined_linear([wide, narrow])
    with pytest.raises(ValueError, match="same dtype"):
        joined_linear([wide, NativeLinear(torch.ones(4, 8).bfloat16())])
