"""Descriptions of stored weights: slices, blocks, conversions, files that change meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aioserve.errors import WeightsError
from aioserve.models.decoding import Decoding
from aioserve.models.safetensors_file import SafetensorsFile
from aioserve.models.stored import (
    PLAIN,
    Plain,
    StoredLinear,
    StoredTensor,
    same_bits,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
fixtures_last = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Stored:
    """Tensors in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[SafetensorsFile] = []

    def tensors(self, **tensors: torch.Tensor) -> dict[str, StoredTensor]:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path)
        self._opened.append(SafetensorsFile(self.path))
        return self._opened[-1].tensors

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path / "some.safetensors")
    yield made
    made.close()


def linear_of(part: StoredTensor, *, transposed: bool = False) -> StoredLinear:
    rows, columns = reversed(part.shape) if transposed else part.shape
    return StoredLinear(Plain(PLAIN[part.dtype], transposed), {"weight": part}, rows, columns)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@fixtures_last
@given(
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    data=st.data(),
)
def test_a_slice_of_a_description_reads_those_rows(
    stored: Stored,
    dtype: torch.dtype,
    transposed: bool,
    rows: int,
    columns: int,
    data: st.DataObject,
):
    weight = torch.randn(rows, columns).to(dtype)
    part = stored.tensors(weight=weight.T if transposed else weight)["weight"]
    whole = linear_of(part, transposed=transposed)
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows))
    sliced = whole.sliced(first, end)
    low = data.draw(st.integers(0, end - first - 1))
    high = data.draw(st.integers(low + 1, end - first))

    expected = weight.float().numpy()
    assert sliced.out_features == end - first
    assert np.array_equal(sliced.floats(), expected[first:end])
    assert np.array_equal(sliced.floats(low, high), expected[first + low : first + high])
    assert np.array_equal(sliced.sliced(low, high).floats(), expected[first + low : first + high])
    for name in ("float32", "bfloat16", "float16"):
        wanted = weight.float().to(getattr(torch, name))
        assert np.array_equal(Decoding(name).array([whole]).view(np.uint8), bits(wanted))
    stored.close()


@pytest.mark.parametrize(("first", "end"), [(0, 0), (-1, 1), (2, 1), (0, 4)])
def test_rows_that_are_not_there_are_refused(stored: Stored, first: int, end: int):
    whole = linear_of(stored.tensors(weight=torch.ones(3, 2))["weight"])
    for read in (whole.sliced, whole.rows, whole.floats):
        with pytest.raises(ValueError, match=rf"rows must lie in \[0, 3\], got {first} to {end}"):
            read(first, end)


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_cover_all_rows_and_stack_to_the_weight(stored: Stored, transposed: bool):
    big, small = torch.randn(3000, 700), torch.randn(5, 700)
    parts = stored.tensors(big=big.T if transposed else big, small=small)
    described = linear_of(parts["big"], transposed=transposed)
    blocks = list(described.blocks())
    assert len(blocks) > 1
    assert [first for first, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == 3000
    both = Decoding("float32").array([described, linear_of(parts["small"])])
    assert np.array_equal(both, torch.cat([big, small]).numpy())


def test_every_float_is_rounded_to_bfloat16_as_torch_does(stored: Stored):
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (upper[:, None] | lower).view(torch.float32)
    read = Decoding("bfloat16").array([linear_of(stored.tensors(weight=values)["weight"])])
    rounded = torch.from_numpy(read).view(torch.bfloat16)
    assert torch.equal(rounded.isnan(), values.isnan())
    there = ~values.isnan()
    assert torch.equal(rounded[there], values.to(torch.bfloat16)[there])


def test_a_file_that_ends_early_is_named(stored: Stored):
    part = stored.tensors(weight=torch.ones(100, 64))["weight"]
    os.truncate(stored.path, stored.path.stat().st_size - 1)
    described = linear_of(part)
    assert described.floats(0, 99).shape == (99, 64)
    with pytest.raises(WeightsError, match=r"some.safetensors: weight can't be read: the file end"):
        described.floats()
    with pytest.raises(WeightsError, match="the file ends early"):
        Decoding("float32").array([described])


def test_decoding_that_was_stopped_says_so(stored: Stored):
    decoding = Decoding("float32")
    decoding.stop()
    with pytest.raises(WeightsError, match="reading was stopped"):
        decoding.array([linear_of(stored.tensors(weight=torch.ones(3, 2))["weight"])])


def test_integers_are_no_floats(stored: Stored):
    part = stored.tensors(numbers=torch.ones(3, 2, dtype=torch.int32))["numbers"]
    assert part.read(1).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(WeightsError, match="numbers must hold floats, has dtype I32"):
        part.read_floats()


def test_the_same_bits_are_of_one_format(stored: Stored):
    ones = torch.ones(3, 2)
    parts = stored.tensors(one=ones, same=ones.clone(), other=ones * 2, narrow=ones.bfloat16())
    one, same, other, narrow = (linear_of(parts[name]) for name in parts)
    found = {part.parts["weight"].name: part for part in (one, same, other, narrow)}
    assert same_bits(found["one"], found["same"])
    assert not same_bits(found["one"], found["other"])
    assert not same_bits(found["one"], found["narrow"])
