"""Layers with permuted inputs give the bits of sorted layers for sorted rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import _native
from aioserve.ops.native import NativeLinear
from aioserve.ops.native_grouped import joined_linear, permuted_linear
from tests.ops.grouped_integers import random_integers, random_rows
from tests.ops.largest import assert_argmax_is_that_of_the_outputs
from tests.tiers import examples


def layer(in_features: int, out_features: int, dtype: torch.dtype) -> NativeLinear:
    integers = random_integers(out_features, in_features, 32, 5, True)
    return integers.weight(dtype, random_rows(1, out_features, dtype)[0]).linear()


def order_of(in_features: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(in_features).astype(np.int32)


@settings(max_examples=examples(40))
@given(
    rows=st.integers(0, 140),
    in_features=st.integers(1, 200),
    out_features=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_outputs_and_rows_are_those_of_the_sorted_layer(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    plain, order = layer(in_features, out_features, dtype), order_of(in_features)
    permuted = permuted_linear(plain, order)
    x = random_rows(rows, in_features, dtype)
    assert torch.equal(permuted(x), plain(x[:, order].contiguous()))
    every = torch.arange(out_features)
    assert torch.equal(permuted.rows(every)[:, order], plain.rows(every))
    assert permuted.num_bytes == plain.num_bytes


def test_outputs_are_the_same_with_any_number_of_threads(threads: None) -> None:
    plain, order = layer(192, 500, torch.bfloat16), order_of(192)
    permuted, x = permuted_linear(plain, order), random_rows(300, 192, torch.bfloat16)
    expected = plain(x[:, order].contiguous())
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        assert torch.equal(permuted(x), expected)


def test_argmax_is_that_of_the_outputs() -> None:
    plain = random_integers(420, 64, 32, 4, False).weight(torch.float32).linear()
    permuted = permuted_linear(plain, order_of(64))
    x = random_rows(45, 64, torch.float32)
    x[9, 5] = float("nan")
    for rows in (1, 14, 45):
        assert_argmax_is_that_of_the_outputs(permuted, x[-rows:])


def test_parts_of_a_layer_have_orders_of_their_own() -> None:
    parts = [layer(96, 40, torch.float32) for _ in range(2)]
    orders = [order_of(96, seed) for seed in (1, 2)]
    permuted = [permuted_linear(part, order) for part, order in zip(parts, orders, strict=True)]
    x = random_rows(7, 96, torch.float32)
    expected = torch.cat(
        [part(x[:, order].contiguous()) for part, order in zip(parts, orders, strict=True)], dim=1
    )
    parts.clear()  # they live as long as the whole
    assert torch.equal(joined_linear(permuted)(x), expected)


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], [0, 1, 2, 3, 4], []]
)
def test_an_order_that_does_not_name_each_input_once_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="order must name each of the 4 inputs once"):
        permuted_linear(NativeLinear(torch.ones(3, 4)), np.array(order, np.int32))
