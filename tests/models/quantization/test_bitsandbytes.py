"""Checkpoints of bitsandbytes: each variant decodes to the floats of its description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from aioserve.errors import UnsupportedModelError, WeightsError
from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.files import model_files
from aioserve.models.quantization.bitsandbytes import BitsAndBytes
from aioserve.models.quantization.scheme import Parts
from aioserve.models.safetensors_file import SafetensorsFile
from tests.models.quantization.blockwise import (
    four_bits,
    load_in,
    storing_eight_bits,
    storing_four_bits,
)
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.writers import write_quantized


def test_eight_bits(tmp_path: Path):
    check_stands_for(*write_quantized(tmp_path, load_in(8), storing_eight_bits))


@pytest.mark.parametrize("double", [0, 16, 256])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(tmp_path: Path, kind: str, block: int, double: int):
    store = storing_four_bits(kind, block, double=double)
    check_stands_for(*write_quantized(tmp_path, load_in(4), store))


@pytest.mark.parametrize("storage", ["int8", "bfloat16", "float16", "float32"])
def test_bytes_of_four_bits_that_are_called_other_numbers(tmp_path: Path, storage: str):
    store = storing_four_bits("nf4", 64, storage=storage)
    check_stands_for(*write_quantized(tmp_path, load_in(4), store))


def test_first_configs_name_no_method_and_skipped_modules_are_plain(tmp_path: Path):
    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        if module.endswith("down_proj"):
            return {"weight": torch.from_numpy(weight)}, weight
        return four_bits(weight, "nf4", 64)

    said = {"load_in_4bit": True, "llm_int8_skip_modules": ["down_proj", "lm_head"]}
    check_stands_for(*write_quantized(tmp_path, said, store))


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    block=st.sampled_from([16, 64]),
    double=st.sampled_from([0, 16]),
    data=st.data(),
)
def test_any_rows_of_any_shape_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    columns: int,
    block: int,
    double: int,
    data: st.DataObject,
):
    weight = np.random.default_rng(rows * columns).standard_normal((rows, columns), np.float32)
    parts, floats = four_bits(weight, "nf4", block, double=double)
    path = tmp_path_factory.mktemp("rows") / "x.safetensors"
    save_file({f"x.{name}": part.contiguous() for name, part in parts.items()}, path)
    file = SafetensorsFile(path)
    try:
        found = {name.removeprefix("x."): part for name, part in file.tensors.items()}
        scheme = BitsAndBytes.read(Fields(load_in(4), "config.json"))
        assert scheme is not None
        stored = scheme.linear(Tensor("x.weight", (rows, columns)), Parts("x", found))
        first = data.draw(st.integers(0, rows - 1))
        end = data.draw(st.integers(first + 1, rows))
        assert np.array_equal(stored.floats(first, end), floats[first:end])
    finally:
        file.close()


def write_wrong(directory: Path, bits: int, wrong: dict[str, Any]) -> Path:
    """Write a model with wrong parts in all modules. None removes a part."""

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        parts, floats = (
            storing_eight_bits(module, weight)
            if bits == 8
            else four_bits(weight, "nf4", 64, double=256)
        )
        for name, part in wrong.items():
            if part is None:
                del parts[name]
            else:
                parts[name] = part.clone() if isinstance(part, torch.Tensor) else part(parts[name])
        return parts, floats

    return write_quantized(directory, load_in(bits), store)[0]


STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changed: Any) -> Any:
    def change(part: torch.Tensor) -> torch.Tensor:
        said = json.loads(bytes(part.tolist())) | changed
        return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


def text(content: str) -> torch.Tensor:
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("bits", "wrong", "message"),
    [
        (8, {"SCB": None}, r"the weights lack model\.layers\.0\..*\.SCB"),
        (8, {"SCB": torch.ones(3)}, r"\.SCB has shape \[3\], quantization_config asks for \["),
        (
            8,
            {"weight_format": torch.tensor(2, dtype=torch.uint8)},
            "must be 0, .*got 2",
        ),
        (8, {"weight": torch.ones(4, 4)}, r"\.weight has dtype F32, .* asks for I8"),
        (4, {STATE: None}, r"\.weight has dtype U8, .* asks for I8"),
        (4, {"weight.absmax": None}, r"the weights lack .*\.weight\.absmax"),
        (4, {"weight.absmax": torch.ones(4)}, r"\.weight\.absmax has dtype F32, .* asks for U8"),
        (4, {"weight.nested_absmax": torch.ones(99)}, r"nested_absmax has shape \[99\]"),
        (4, {"weight.nested_quant_map": torch.ones(16)}, r"nested_quant_map has shape \[16\]"),
        (4, {"weight.quant_map": torch.ones(17)}, r"\.quant_map has shape \[17\]"),
        (4, {"weight": torch.ones(5, 1, dtype=torch.uint8)}, r"\.weight has shape \[5, 1\]"),
        (4, {"more": torch.ones(2)}, r"has no place for .*\.more"),
        (4, {STATE: text("[1]")}, r"__nf4 can't be read: "),
        (4, {STATE: text("{")}, r"__nf4 can't be read: "),
        (4, {STATE: text("[" * 4000)}, r"__nf4 can't be read: "),
        (4, {STATE: torch.zeros(5000, dtype=torch.uint8)}, "at most 4096 bytes, has 5000"),
        (4, {STATE: torch.zeros(50)}, r"__nf4 has dtype F32"),
        (4, {STATE: state(shape=[1, 2])}, r"tells of shape \[1, 2\], config\.json of \["),
        (4, {STATE: state(shape=[10**30, -7])}, r"tells of shape|can't be read"),
        (4, {STATE: state(shape=[1] * 1000)}, r"__nf4 can't be read: .*shape"),
        (4, {STATE: state(blocksize=0)}, r"__nf4 can't be read: .*blocksize"),
        (4, {STATE: state(blocksize=10**18)}, r"__nf4 can't be read: .*blocksize"),
        (4, {STATE: state(nested_blocksize=1)}, r"__nf4 can't be read: .*nested_blocksize"),
        (4, {f"{STATE[:-3]}fp4": text("{}")}, "one quant_state of a weight, got .*fp4, .*nf4"),
        (4, {STATE: None, f"{STATE[:-3]}nf9": text("{}")}, r"nf4 and fp4, got 'nf9'"),
    ],
)
def test_a_part_that_is_wrong_is_named(
    tmp_path: Path, bits: int, wrong: dict[str, Any], message: str
):
    model = write_wrong(tmp_path, bits, wrong)
    with pytest.raises(WeightsError, match=message):
        check_stands_for(model, model)


def test_a_config_that_says_both_is_refused(tmp_path: Path):
    said = load_in(4, load_in_4bit=True, load_in_8bit=True)
    model, _ = write_quantized(tmp_path, said, storing_eight_bits)
    with pytest.raises(UnsupportedModelError, match=r"quantization_config\.load_in_4bit"):
        model_files(model).config()


def test_integers_of_a_config_that_says_neither_are_refused(tmp_path: Path):
    said = load_in(4, load_in_4bit=False, load_in_8bit=False)
    model, _ = write_quantized(tmp_path, said, storing_eight_bits)
    with pytest.raises(WeightsError, match=r"weight"):
        model_files(model).weights(model_files(model).config())


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path):
    model, _ = write_quantized(tmp_path, load_in(4), storing_four_bits("nf4", 64))
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        check_stands_for(model, model)
