"""WeightIntegers: the meaning of its numbers, to the last bit, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import WeightsError
from aioserve.models.weight_integers import GROUP_SIZES, WeightIntegers


@st.composite
def grouped_integers(draw: st.DrawFn) -> WeightIntegers:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 300))
    group_size = draw(st.sampled_from((*GROUP_SIZES, columns)))
    ranges = ((-8, 7, 4), (0, 15, 4), (-16, 15, 5), (0, 31, 5), (-32, 31, 6), (-128, 127, 8))
    low, high, bits = draw(st.sampled_from(ranges))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (rows, -(-columns // group_size))
    zeros = rng.integers(-128, 128, shape, np.int8) if draw(st.booleans()) else None
    minimums = rng.standard_normal(shape, np.float32) if draw(st.booleans()) else None
    return WeightIntegers(
        rng.integers(low, high + 1, (rows, columns), np.int8),
        rng.standard_normal(shape, np.float32) * np.float32(10.0 ** rng.integers(-6, 6)),
        zeros,
        minimums,
        group_size,
        bits,
        order=rng.permutation(columns).astype(np.int32) if draw(st.booleans()) else None,
    )


@given(grouped_integers())
def test_each_weight_is_rounded_after_its_product_and_after_its_sum(grouped: WeightIntegers):
    weight = grouped.dequantized()
    assert weight.dtype == np.float32
    assert weight.shape == (grouped.out_features, grouped.in_features)
    order = np.arange(grouped.in_features) if grouped.order is None else grouped.order
    for row, column in np.ndindex(weight.shape):
        group = column // grouped.group_size
        value = int(grouped.values[row, column])
        if grouped.zeros is not None:
            value -= int(grouped.zeros[row, group])
        expected = np.float32(value) * grouped.scales[row, group]
        if grouped.minimums is not None:
            expected = expected + grouped.minimums[row, group]
        assert weight[row, order[column]].tobytes() == expected.tobytes()


@given(grouped_integers(), st.data())
def test_rows_are_those_of_the_whole(grouped: WeightIntegers, data: st.DataObject):
    first = data.draw(st.integers(0, grouped.out_features - 1))
    end = data.draw(st.integers(first + 1, grouped.out_features))
    part = grouped.rows(first, end)
    assert np.array_equal(part.dequantized(), grouped.dequantized()[first:end])
    assert np.shares_memory(part.values, grouped.values)


@pytest.mark.parametrize(("first", "end"), [(0, 0), (1, 1), (-1, 2), (0, 4), (2, 1)])
def test_rows_that_are_not_there_are_refused(first: int, end: int):
    with pytest.raises(ValueError, match=rf"got {first} to {end}"):
        WeightIntegers(**_fields()).rows(first, end)


def _fields(**changed: Any) -> dict[str, Any]:
    fields = {
        "values": np.zeros((3, 40), np.int8),
        "scales": np.ones((3, 2), np.float32),
        "zeros": None,
        "minimums": None,
        "group_size": 32,
        "bits": 8,
    }
    return fields | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"values": np.zeros((3, 40), np.int16)}, "values must be int8"),
        ({"values": np.zeros(40, np.int8)}, "values must be int8 of shape"),
        ({"values": np.zeros((0, 40), np.int8)}, "values must be int8 of shape"),
        ({"scales": np.ones((3, 1), np.float32)}, r"scales must be float32 of shape \[3, 2\]"),
        ({"scales": np.ones((3, 2), np.float64)}, "scales must be float32"),
        ({"zeros": np.zeros((2, 2), np.int8)}, r"zeros must be int8 of shape \[3, 2\]"),
        ({"minimums": np.zeros((3, 2), np.int8)}, "minimums must be float32"),
        ({"group_size": 48}, "group_size must be 16, 32, 64, 128 or the number of inputs, 40"),
        ({"group_size": 0}, "group_size must be"),
        ({"bits": 7}, "bits must be 4, 5, 6 or 8, got 7"),
        ({"values": np.full((3, 40), -17, np.int8), "bits": 5}, r"within \[-16, 15\] or \[0, 31\]"),
        ({"order": np.arange(40)}, "order must name each of 40 inputs once, in int32"),
        ({"order": np.zeros(40, np.int32)}, "order must name each of 40 inputs once"),
        ({"table": tuple(range(16))}, "table must have 16 numbers from -128 to 127, and bits be 4"),
        ({"table": tuple(range(15)), "bits": 4}, "table must have 16 numbers"),
        ({"table": tuple(range(113, 129)), "bits": 4}, "table must have 16 numbers"),
        ({"table": tuple(range(1, 17)), "bits": 4}, r"values must be in the table \(1, 2"),
        ({"values": np.full((3, 40), 16, np.int8), "bits": 4}, r"within \[-8, 7\] or \[0, 15\]"),
        (
            {"values": np.repeat(np.array([[-1], [8], [0]], np.int8), 40, 1), "bits": 4},
            "got -1 to 8",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str):
    with pytest.raises(WeightsError, match=message):
        WeightIntegers(**_fields(**changed))
