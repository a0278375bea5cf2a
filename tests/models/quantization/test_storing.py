"""Rounding and layouts of methods, read here with torch by the published descriptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError, WeightsError
from aioserve.models.quantization.packing import E4M3, e4m3_bits, packed, unpacked
from aioserve.models.quantization.storing import METHODS, Compressed, method_named
from tests.models.quantization.layouts import decoded

NAMES = sorted(METHODS)


@st.composite
def methods(draw: st.DrawFn) -> Compressed:
    name = draw(st.sampled_from(NAMES))
    return method_named(name, draw(st.sampled_from([32, 64, 128])) if name == "w4a16" else None)


@st.composite
def weights(draw: st.DrawFn, multiple: int) -> np.ndarray:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 300))
    if multiple:
        columns = multiple * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = rng.standard_normal((rows, columns), np.float32)
    weight[:, rng.integers(columns)] *= draw(st.sampled_from([0, 1, 100]))
    weight[rng.integers(rows)] *= draw(st.sampled_from([0, 1, 1e-42, 1e30]))
    return weight


@given(data=st.data(), method=methods(), scales=st.sampled_from(["BF16", "F32"]))
def test_what_is_stored_is_the_nearest_to_the_weight_with_its_scales(
    data: st.DataObject, method: Compressed, scales: str
):
    weight = data.draw(weights(method.group_size))
    rows, columns = weight.shape
    parts = method.encoded(weight, scales)
    wanted = method.parts(rows, columns, scales)
    wanted.pop("weight_shape", None)
    assert parts.keys() == wanted.keys()
    sizes = {"I32": 4, "F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1}
    for name, (dtype, shape) in wanted.items():
        assert parts[name].shape == shape
        assert parts[name].itemsize == sizes[dtype]
    given_back, each = (part.numpy() for part in decoded(parts, method, columns))
    assert np.isfinite(given_back).all()
    steps = np.abs(each.astype(np.float64))
    if method.kind == "float":
        steps = np.maximum(np.abs(weight) / 8, steps * 2.0**-9)  # three bits behind the first
    errors = np.abs(given_back.astype(np.float64) - weight)
    ends = {"int": 127 if method.bits == 8 else 7, "float": 448}[method.kind]
    tiny = float(np.finfo(np.float32).tiny)
    inside = np.abs(weight) <= np.abs(each) * ends
    assert (errors <= steps * 0.5001 + tiny)[inside].all()
    cut_off = 1.5001 if method.bits == 4 else 0.51 * ends * 2.0**-7
    normal = np.abs(weight) > tiny * 1000
    assert (errors <= np.abs(each) * cut_off)[normal & ~inside].all()
    row = data.draw(st.integers(0, rows - 1))
    alone = method.encoded(weight[row : row + 1], scales)
    assert all(np.array_equal(alone[name], parts[name][row : row + 1]) for name in parts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(name: str, bad: float):
    weight = np.ones((2, 64), np.float32)
    weight[1, 3] = bad
    with pytest.raises(WeightsError, match="NaN and infinity can't be quantised"):
        method_named(name, None).encoded(weight, "F32")


def test_floats_of_8_bits_are_rounded_as_torch_does():
    codes = np.arange(127, dtype=np.uint8)
    middles = (E4M3[codes[:-1]] + E4M3[codes[1:]]) / 2
    exact = np.concatenate([E4M3[codes], middles])
    near = np.concatenate([exact, np.nextafter(exact, 0), np.nextafter(exact, np.float32(1e9))])
    drawn = np.random.default_rng(0).standard_normal(100_000, np.float32) * 50
    every = np.concatenate([near, -near, drawn]).astype(np.float32).clip(-448, 448)
    theirs = torch.from_numpy(every).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_bits(every), theirs)
    assert np.array_equal(e4m3_bits(np.array([449, -1e30], np.float32)), [126, 254])


@given(bits=st.sampled_from([4, 8]), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_packed_numbers_are_those_that_are_unpacked(bits: int, columns: int, seed: int):
    numbers = np.random.default_rng(seed).integers(0, 2**bits, (3, columns)).astype(np.uint8)
    words = packed(numbers, bits)
    assert words.dtype == np.int32
    assert np.array_equal(unpacked(words.T, bits)[:columns].T, numbers)


@pytest.mark.parametrize(
    ("name", "group_size", "named"),
    [
        ("gptq", None, "method must be int8, w8a8, w4a16, fp8, got 'gptq'"),
        ("int8", 32, "group_size must be left out with method int8"),
        ("w4a16", 16, "group_size must be 32, 64, 128, got 16"),
    ],
)
def test_what_no_method_is_is_refused(name: str, group_size: int | None, named: str):
    with pytest.raises(ConfigError) as refusal:
        method_named(name, group_size)
    assert named in str(refusal.value)
    assert refusal.value.argument in ("method", "group_size")
