"""Panels that tasks of many rows unpack first give the bits of tasks of few rows.

The latter read panels packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import _native
from aioserve.ops.native import NativeLinear
from tests.ops.grouped_integers import KEPT, TABLE, Kept, random_integers, random_rows
from tests.ops.largest import assert_argmax_is_that_of_the_outputs
from tests.tiers import examples

KINDS = [(bits, has_minimums) for bits in (6, 5, 4, TABLE) for has_minimums in (False, True)]
kinds = pytest.mark.parametrize(("bits", "has_minimums"), KINDS)


def alone(layer: NativeLinear, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([layer(x[row : row + 1]) for row in range(len(x))])


@kinds
@pytest.mark.parametrize("kept", KEPT)
def test_rows_give_the_same_bits_wherever_unpacking_begins(
    isa: str, threads: None, bits: int, has_minimums: bool, kept: Kept
) -> None:
    # There are several tasks, the last with fewer panels, one of them incomplete.
    integers = random_integers(32 * 9 + 5, 304, 16, bits, has_minimums, kept)
    layer = integers.weight(torch.bfloat16).linear(torch.float32)
    x = random_rows(131, 304, torch.bfloat16)
    expected = alone(layer, x)
    for count in (1, 2):
        _native.set_num_threads(count)
        for rows in (15, 16, 31, 32, 33, 47, 48, 63, 64, 65, 131):
            assert torch.equal(layer(x[:rows]), expected[:rows])


@settings(max_examples=examples(40))
@given(
    shapes=st.lists(
        st.tuples(
            st.integers(1, 300),
            st.integers(1, 600),
            st.sampled_from([16, 32, 64, 128]),
            st.sampled_from(KINDS),
            st.sampled_from(KEPT),
        ),
        min_size=2,
        max_size=3,
    ),
    rows=st.integers(60, 200),
)
def test_what_one_weight_unpacked_is_never_read_as_anothers(
    shapes: list[tuple[int, int, int, tuple[int, bool], Kept]], rows: int
) -> None:
    layers = [
        random_integers(out_features, in_features, size, *kind, kept, seed=index)
        .weight(torch.float32)
        .linear()
        for index, (out_features, in_features, size, kind, kept) in enumerate(shapes)
    ]
    inputs = [random_rows(rows, in_features, torch.float32) for _, in_features, *_ in shapes]
    expected = [alone(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    for _ in range(2):
        for layer, x, y in zip(layers, inputs, expected, strict=True):
            assert torch.equal(layer(x), y)


@kinds
def test_argmax_of_many_rows_is_that_of_their_outputs(
    isa: str, threads: None, bits: int, has_minimums: bool
) -> None:
    layer = random_integers(300, 96, 32, bits, has_minimums).weight(torch.float32).linear()
    for count in (1, 2):
        _native.set_num_threads(count)
        assert_argmax_is_that_of_the_outputs(layer, random_rows(90, 96, torch.float32))


@kinds
def test_a_vocabulary_is_looked_up_as_it_is_kept_after_many_rows_unpacked_it(
    bits: int, has_minimums: bool
) -> None:
    integers = random_integers(200, 96, 32, bits, has_minimums)
    layer = integers.weight(torch.float32).linear()
    layer(random_rows(90, 96, torch.float32))
    assert torch.equal(layer.rows(torch.arange(200)), torch.from_numpy(integers.dequantized()))
