"""Checkpoints of GPTQ and AWQ: each variant stands for the floats that its description says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import UnsupportedModelError, WeightsError
from aioserve.models.fields import Fields
from aioserve.models.files import model_files
from aioserve.models.quantization.awq import Awq
from aioserve.models.quantization.gptq import Gptq
from aioserve.models.quantization.packing import unpacked
from aioserve.models.stored import StoredLinear
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.writers import Numbers, numbers_of, pack, write_quantized


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    words=st.integers(1, 4),
    width=st.integers(1, 3),
    data=st.data(),
)
def test_packed_numbers_come_back(bits: int, words: int, width: int, data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    numbers = rng.integers(0, 2**bits, (words * 32, width))
    assert np.array_equal(unpacked(pack(numbers, bits), bits), numbers)


def test_every_byte_comes_back_in_every_place_of_a_word():
    for place in range(4):
        numbers = np.zeros((4, 256), np.int64)
        numbers[place] = np.arange(256)
        assert np.array_equal(unpacked(pack(numbers, 8), 8), numbers)
        for bits in (2, 4):
            parts = np.concatenate(
                [numbers >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
            )
            in_order = parts.reshape(8 // bits, 4, 256).transpose(1, 0, 2).reshape(-1, 256)
            assert np.array_equal(unpacked(pack(in_order, bits), bits), in_order)


def gptq_parts(numbers: Numbers, *, version: int, with_index: str = "absent") -> dict[str, Any]:
    """with_index: "absent", "zeros" or "groups"."""
    stored = numbers.zeros if version == 2 else (numbers.zeros - 1) % 2**numbers.bits
    parts = {
        "qweight": pack(numbers.values.T, numbers.bits),
        "qzeros": pack(stored, numbers.bits).T,
        "scales": numbers.scales.T.astype(np.float16),
    }
    if with_index != "absent":
        index = numbers.index if with_index == "groups" else np.zeros_like(numbers.index)
        parts["g_idx"] = index.astype(np.int32)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def gptq_config(bits: int, group_size: int, **other: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, **other}


def write_gptq(
    directory: Path,
    bits: int,
    group_size: int,
    *,
    version: int = 1,
    index: str = "groups",
    symmetric: bool = False,
    act_order: bool = False,
    **other: Any,
) -> tuple[Path, Path]:
    rng = np.random.default_rng(bits * 1000 + group_size)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(
            weight, bits, group_size, symmetric=symmetric, act_order=act_order, rng=rng
        )
        return gptq_parts(numbers, version=version, with_index=index), numbers.floats

    other = {"checkpoint_format": f"gptq_v{version}" if version == 2 else "gptq"} | other
    said = gptq_config(bits, group_size, desc_act=act_order, sym=symmetric, **other)
    return write_quantized(directory, said, store)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_in_bits_groups_and_versions(tmp_path: Path, bits: int, group_size: int, version: int):
    model, floats = write_gptq(tmp_path, bits, group_size, version=version)
    check_stands_for(model, floats)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_in_the_order_of_activations(tmp_path: Path, bits: int):
    model, floats = write_gptq(tmp_path, bits, 16, act_order=True)
    check_stands_for(model, floats)


@pytest.mark.parametrize("index", ["absent", "zeros"])
def test_no_index_and_one_of_zeros_mean_groups_in_order(tmp_path: Path, index: str):
    model, floats = write_gptq(tmp_path, 4, 32, index=index)
    check_stands_for(model, floats)


@pytest.mark.parametrize("labelled", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_files_of_either_version_and_label_are_read(
    tmp_path: Path, bits: int, version: int, labelled: str
):
    model, floats = write_gptq(
        tmp_path, bits, 32, version=version, symmetric=True, checkpoint_format=labelled
    )
    check_stands_for(model, floats)


def test_an_index_beyond_the_groups_is_refused(tmp_path: Path):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, 32, rng=rng)
        parts = gptq_parts(numbers, version=1, with_index="groups")
        parts["g_idx"][3] = 99
        return parts, numbers.floats

    model, _ = write_quantized(tmp_path, gptq_config(4, 32), store)
    with pytest.raises(WeightsError, match=r"_proj: g_idx must name groups from 0 to [12]"):
        check_stands_for(model, model)


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("qweight", (3, 3), r"\.qweight has shape \[3, 3\], quantization_config asks for \["),
        ("scales", (1, 1), r"\.scales has shape \[1, 1\], quantization_config asks for \["),
        ("qzeros", None, r"the weights lack .*\.qzeros"),
        ("more", (2, 2), r"has no place for .*\.more"),
        ("bias", (64,), r"has no place for .*\.bias"),
    ],
)
def test_a_part_that_is_wrong_is_named(
    tmp_path: Path, part: str, shape: tuple[int, ...] | None, message: str
):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, 32, rng=rng)
        parts = gptq_parts(numbers, version=1)
        if shape is None:
            del parts[part]
        else:
            dtype = parts[part].dtype if part in parts else torch.float16
            parts[part] = torch.ones(shape, dtype=dtype)
        return parts, numbers.floats

    model, _ = write_quantized(tmp_path, gptq_config(4, 32), store)
    with pytest.raises(WeightsError, match=message):
        check_stands_for(model, model)


def test_biases_of_zeros_that_no_layer_has_are_left_out(tmp_path: Path):
    rng = np.random.default_rng(0)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, 32, rng=rng)
        parts = gptq_parts(numbers, version=1)
        return parts | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, numbers.floats

    model, floats = write_quantized(tmp_path, gptq_config(4, 32), store)
    check_stands_for(model, floats)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (gptq_config(5, 32), "quantization_config.bits = 5"),
        (gptq_config(4, 48), "quantization_config.group_size = 48"),
        (gptq_config(4, 0), "quantization_config.group_size = 0"),
        (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
        (gptq_config(4, 32, dynamic={"-:lm_head": {}}), "quantization_config.dynamic"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits = 3"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version = 'gemv'"),
        ({"quant_method": "awq", "group_size": 20}, "quantization_config.group_size = 20"),
        ({"quant_method": "quip"}, "quantization_config.quant_method = 'quip'"),
    ],
)
def test_variants_that_are_not_read_are_refused_by_name(
    tmp_path: Path, said: dict[str, Any], named: str
):
    model, _ = write_quantized(tmp_path, said, lambda module, weight: ({}, weight))
    with pytest.raises(UnsupportedModelError) as refusal:
        model_files(model).config()
    assert named in str(refusal.value)


def awq_words(numbers: np.ndarray) -> np.ndarray:
    """Along the last axis: eight numbers in a word, in AWQ's order."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows, columns = numbers.shape
    words = np.zeros((rows, columns // 8), np.uint32)
    for row in range(rows):
        for word in range(columns // 8):
            for place, column in enumerate(order):
                words[row, word] |= np.uint32(int(numbers[row, word * 8 + column]) << (4 * place))
    return words.view(np.int32)


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_awq(tmp_path: Path, group_size: int, has_zeros: bool):
    rng = np.random.default_rng(5)

    def store(module: str, weight: np.ndarray) -> tuple[Any, np.ndarray]:
        numbers = numbers_of(weight, 4, group_size, symmetric=not has_zeros, rng=rng)
        parts = {
            "qweight": awq_words(numbers.values.T),
            "scales": np.ascontiguousarray(numbers.scales.T.astype(np.float16)),
            "qzeros": awq_words(numbers.zeros.T),
        }
        return {name: torch.from_numpy(part) for name, part in parts.items()}, numbers.floats

    said = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": has_zeros}
    model, floats = write_quantized(tmp_path, said | {"version": "gemm"}, store)
    check_stands_for(model, floats)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_lies_by_inputs_is_decoded_many_outputs_at_once(method: str):
    """Else each input's few bytes are read for themselves, and a large model takes minutes."""
    said = {"bits": 4, "group_size": 128}
    format_ = (Gptq if method == "gptq" else Awq).read(Fields(said, "config.json"))
    blocks = list(StoredLinear(format_, {}, 4096, 14336, 128).blocks())
    assert blocks == [(first, first + 512) for first in range(0, 4096, 512)]
