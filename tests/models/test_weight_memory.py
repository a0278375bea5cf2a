"""Memory of weights is known to the byte before they are loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aioserve.formats.weights import CUDA, NATIVE, PLAIN_FLOATS, PackedLinear
from aioserve.models.files import model_files
from aioserve.models.reading import ReadWeights, WeightReading
from aioserve.models.stored import PLAIN
from aioserve.models.weight_memory import WeightMemory
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert
from tests.models.gguf.writing import BY_NAME
from tests.models.quantization.blockwise import load_in, storing_four_bits
from tests.models.quantization.compressed import float8, storing_blocks, write_mixture
from tests.models.quantization.test_gptq_awq import write_gptq
from tests.models.quantization.writers import write_quantized
from tests.parity.tiny_models import CONFIGS, write

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
"""Model whose rows are whole blocks of every format."""


def check(
    path: Path, *, dtype: str = "bfloat16", quantization: str | None = None
) -> tuple[WeightMemory, WeightMemory]:
    """Check expected memory on all backends. Returns that of the native and the reference one."""
    found: list[WeightMemory] = []
    for formats in (NATIVE, PLAIN_FLOATS, CUDA):
        files = model_files(path)
        with WeightReading(
            files, dtype=dtype, formats=formats, quantization=quantization
        ) as reading:
            expected = reading.expected_memory
            weights = reading.read()
        assert weights.memory.held_bytes == held_bytes(weights)
        if formats is CUDA:  # it keeps scales in 16 bits if those of all rows fit
            assert expected.held_bytes == pytest.approx(held_bytes(weights), rel=0.05)
        else:
            assert weights.memory == expected
        assert expected.step_bytes <= expected.held_bytes
        found.append(expected)
    native, plain, _ = found
    names = [{one.format for one in each.formats} for each in found]
    assert names[0] == names[1] == names[2]
    for one in plain.formats:
        assert one.held_bytes == one.parameters * (2 if dtype == "bfloat16" else 4)
    return native, plain


def held_bytes(weights: ReadWeights) -> int:
    kernels = 0
    for held in weights.linears.values():
        runs = held.runs if isinstance(held, PackedLinear) else (held,)
        kernels += sum(run.num_bytes for run in runs)
    return kernels + sum(array.nbytes for array in weights.arrays.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "phi3", "qwen2", "qwen3"])
def test_rounded_and_plain_weights(
    tmp_path: Path, name: str, quantization: str | None, dtype: str
) -> None:
    """The models have biases, fused layers, tied and untied heads, and odd widths."""
    native, _ = check(write(name, tmp_path), dtype=dtype, quantization=quantization)
    names = {one.format for one in native.formats}
    wanted = {None: set(), "int8": {"int8-g128"}, "int4": {"int4-g32", "int8-g128"}}
    wanted["fp8"] = {"fp8-e4m3", "int8-g128"}
    assert names - set(PLAIN.values()) == wanted[quantization]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("format", list(BY_NAME))
def test_formats_of_gguf(tmp_path: Path, format: str) -> None:
    directory = write_random_model(tmp_path / "hf", {**CONFIGS["llama"], **WIDE}, dtype="float32")
    native, _ = check(convert(directory, tmp_path / "x.gguf", weights=format))
    assert {one.format for one in native.formats} == {"float32", PLAIN.get(format, format)}


def test_formats_that_are_mixed_within_a_layer(tmp_path: Path) -> None:
    directory = write_random_model(tmp_path / "hf", {**CONFIGS["llama"], **WIDE}, dtype="float32")
    mixed = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "blk.1.attn_k": "Q5_0"}
    file = convert(directory, tmp_path / "x.gguf", weights="Q4_K", formats=mixed)
    native, _ = check(file)
    tensors = {one.format: one.tensors for one in native.formats}
    assert tensors["Q6_K"] == 4
    assert tensors["Q5_0"] == 1
    assert tensors["Q8_0"] == 1


def test_a_mixture_of_formats_in_a_directory(tmp_path: Path) -> None:
    native, _ = check(write_mixture(tmp_path)[0])
    assert len(native.formats) == 4


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq(tmp_path: Path, bits: int, act_order: bool) -> None:
    check(write_gptq(tmp_path, bits, 32, act_order=act_order)[0])


@pytest.mark.parametrize("block", [None, (32, 16), (16, 64)])
def test_fp8_with_scales_by_tensor_and_by_block(
    tmp_path: Path, block: tuple[int, int] | None
) -> None:
    if block is not None:
        store = storing_blocks(block, "weight_scale_inv")
        said = {"quant_method": "fp8", "weight_block_size": list(block)}
    else:
        said, store = {"quant_method": "fp8"}, storing_one_scale
    check(write_quantized(tmp_path, said, store)[0])


def storing_one_scale(
    module: str, weight: np.ndarray
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    narrow, floats = float8(weight, np.full_like(weight, 0.01))
    return {"weight": narrow, "weight_scale": torch.tensor(0.01)}, floats


@pytest.mark.parametrize("double", [0, 16])
def test_codes_of_bitsandbytes(tmp_path: Path, double: int) -> None:
    check(write_quantized(tmp_path, load_in(4), storing_four_bits("nf4", 64, double=double))[0])


def test_an_embedding_of_two_copies_is_read_once_in_a_step(tmp_path: Path) -> None:
    native, plain = check(write("qwen3", tmp_path))
    config = CONFIGS["qwen3"]
    table = 2 * config["vocab_size"] * config["hidden_size"]
    assert config["tie_word_embeddings"]
    assert native.held_bytes - native.step_bytes == table
    assert plain.held_bytes == plain.step_bytes
