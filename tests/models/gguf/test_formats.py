"""Number formats of GGUF: weights equal those of the libraries that made them, bit for bit."""

from __future__ import annotations

import gguf
import libgguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.models.gguf.formats import FORMATS, GGUFFormat, decoded, format_name
from aioserve.models.weight_integers import WeightIntegers
from tests.models.gguf.writing import BY_NAME, quantized, reference

FLOATS = ("F32", "F16", "BF16")
INTEGERS = tuple(name for name in BY_NAME if name not in FLOATS)
SPECIAL_F16 = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E01, 0x3C00, 0xBC01)
"""Bits of zeros, subnormals, the largest number, infinities, NaN, one, and a negative number."""


def weights(rows: npt.NDArray[np.uint8], form: GGUFFormat) -> npt.NDArray[np.float32]:
    found = decoded(form, rows)
    with np.errstate(all="ignore"):
        return found.dequantized() if isinstance(found, WeightIntegers) else found


def same_bits(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """True if arrays are equal bit for bit, where a NaN equals any NaN."""
    assert one.dtype == other.dtype == np.float32
    assert one.shape == other.shape
    equal = one.view(np.uint32) == other.view(np.uint32)
    return bool((equal | (np.isnan(one) & np.isnan(other))).all())


@pytest.mark.parametrize("name", BY_NAME)
@given(data=st.data())
def test_any_bytes_are_the_weights_that_the_references_read(name: str, data: st.DataObject) -> None:
    form = BY_NAME[name]
    count, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = count * blocks * form.bytes_per_block
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = rng.integers(0, 256, size, np.uint8).reshape(count, -1)
    if data.draw(st.booleans()):
        fields = rows.view(form.block)
        for field in form.block.names or ():
            if form.block[field] == np.dtype("<f2"):
                drawn = st.lists(st.sampled_from(SPECIAL_F16), min_size=count, max_size=count)
                fields[field][:, 0] = np.array(data.draw(drawn), np.uint16).view(np.float16)

    found = weights(rows, form)

    assert same_bits(found, reference(rows, form))
    if name not in FLOATS:
        assert same_bits(found, libgguf.dequantize_rows(rows, form.number))


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (64, 768)])
def test_quantised_weights_are_close_to_what_they_were_made_from(
    name: str, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    made_from = rng.normal(0.1, 1.0, shape).astype(np.float32)  # asymmetric
    made_from[:, 5] *= 8  # an outlier column
    rows = quantized(made_from, name)

    found = weights(rows, BY_NAME[name])

    assert same_bits(found, reference(rows, BY_NAME[name]))
    error = np.sqrt(np.mean((found - made_from) ** 2)) / np.std(made_from)
    assert error < (0.4 if name == "Q2_K" else 0.2)


@pytest.mark.parametrize("name", BY_NAME)
def test_any_range_of_rows_is_decoded_as_all_of_them_are(name: str) -> None:
    form = BY_NAME[name]
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (9, 2 * form.bytes_per_block), np.uint8)
    whole = weights(rows, form)
    for first, end in ((0, 1), (3, 7), (8, 9)):
        assert same_bits(weights(rows[first:end], form), whole[first:end])


@pytest.mark.parametrize(
    ("name", "group_size", "bits", "least", "largest", "has_minimums"),
    [
        ("Q4_0", 32, 4, -8, 7, False),
        ("Q4_1", 32, 4, 0, 15, True),
        ("Q5_0", 32, 5, -16, 15, False),
        ("Q5_1", 32, 5, 0, 31, True),
        ("Q8_0", 32, 8, -128, 127, False),
        ("Q2_K", 16, 4, 0, 3, True),
        ("Q3_K", 16, 4, -4, 3, False),
        ("Q4_K", 32, 4, 0, 15, True),
        ("Q5_K", 32, 5, 0, 31, True),
        ("Q6_K", 16, 6, -32, 31, False),
        ("IQ4_NL", 32, 4, -127, 113, False),
        ("IQ4_XS", 32, 4, -127, 113, False),
        ("MXFP4", 32, 4, -12, 12, False),
    ],
)
def test_integers_keep_the_groups_of_their_format(
    name: str, group_size: int, bits: int, least: int, largest: int, has_minimums: bool
) -> None:
    form = BY_NAME[name]
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (64, 2 * form.bytes_per_block), np.uint8)

    found = decoded(form, rows)

    assert isinstance(found, WeightIntegers)
    assert found.values.shape == (64, 2 * form.values_per_block)
    assert (found.group_size, found.bits) == (group_size, bits)
    assert (found.values.min(), found.values.max()) == (least, largest)
    assert found.zeros is None
    assert (found.minimums is not None) == has_minimums


def test_mxfp4_is_in_split_order() -> None:
    """Byte j has element j in its low half and j + 16 in its high half. Other files have pairs."""
    block = bytes([127]) + bytes((16 - 1 - j) << 4 | j for j in range(16))
    rows = np.frombuffer(block, np.uint8).reshape(1, -1)
    found = decoded(BY_NAME["MXFP4"], rows)
    assert isinstance(found, WeightIntegers)
    table = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    assert found.values[0].tolist() == table + table[::-1]
    assert found.scales.tolist() == [[0.5]]


def test_every_scale_of_mxfp4_is_the_references() -> None:
    rows = np.zeros((256, 17), np.uint8)
    rows[:, 0] = np.arange(256)
    rows[:, 1:] = 0x12
    assert same_bits(weights(rows, BY_NAME["MXFP4"]), reference(rows, BY_NAME["MXFP4"]))


def test_numbers_and_sizes_are_those_of_the_gguf_package() -> None:
    for form in FORMATS.values():
        kind = gguf.GGMLQuantizationType[form.name]
        assert kind == form.number
        assert gguf.GGML_QUANT_SIZES[kind] == (form.values_per_block, form.bytes_per_block)
    for kind in gguf.GGMLQuantizationType:
        assert format_name(kind) == kind.name
    assert format_name(1000) == "number 1000"


def test_decoded_weights_share_no_memory_with_the_bytes() -> None:
    for name in INTEGERS:
        form = BY_NAME[name]
        rows = np.zeros((2, form.bytes_per_block), np.uint8)
        found = decoded(form, rows)
        assert isinstance(found, WeightIntegers)
        assert not np.shares_memory(found.values, rows)
        assert not np.shares_memory(found.scales, rows)
