"""GGUF files equal the models that they were made from: config, tensors, tokenizer, logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve.config import EngineConfig
from aioserve.execution import loading
from aioserve.models.architecture import Linear, parts_of
from aioserve.models.files import model_files
from aioserve.models.gguf.model import GGUFModel
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import ARCHITECTURES, convert, converted
from tests.models.gguf.vocabularies import write_byte_level
from tests.models.gguf.writing import BY_NAME, quantized, reference
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE

PROMPT = [(7 * i) % VOCAB_SIZE for i in range(40)]
NOT_WRITTEN = ("qwen2-sliding", "qwen3-sliding", "qwen2-moe-normalized", "deepseek3-halves")
"""Models that converters can't write: windows, layers without experts, another rotation."""
SAID_OTHERWISE: dict[str, dict[str, Any]] = {
    # Settings that files lack have llama.cpp's values.
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen2-moe": {"decoder_sparse_step": 1},
    "gpt-oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "deepseek3": {
        "rope_scaling": {**CONFIGS["deepseek3"]["rope_scaling"], "mscale": 0.7},
        "num_nextn_predict_layers": 0,
    },
}
NAMES = [
    name
    for name, config in CONFIGS.items()
    if name not in NOT_WRITTEN and config["architectures"][0] in ARCHITECTURES
]
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
"""Model whose rows are whole blocks of every format."""


def written(name: str, directory: Path, *, dtype: str = "float32", **fields: Any) -> Path:
    config = {**CONFIGS[name], **SAID_OTHERWISE.get(name, {}), **fields}
    return write_random_model(directory, config, dtype=dtype)


def logits_of(path: Path, backend: str = "auto") -> torch.Tensor:
    decoder = load_model(path, dtype="float32", backend=backend_named(backend))
    return PagedRun(decoder).step({"a": PROMPT})["a"]


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_that_of_the_directory(tmp_path: Path, name: str) -> None:
    directory = written(name, tmp_path / "hf")
    expected = model_files(directory).config()
    found = model_files(convert(directory, tmp_path / "x.gguf")).config()
    if name == "llama3":  # the file has divisors instead of its parameters
        ropes = {layer.mixer.rope for layer in found.layers}
        assert [rope.kind for rope in ropes if rope is not None] == ["longrope"]
        found = replace(found, layers=expected.layers)
    if name in ("mistral-full", "deepseek3"):  # read as Llama without a window, V2 without experts
        found = replace(found, architecture=expected.architecture)
    assert replace(found, dtype="float32", generation=expected.generation) == expected


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_directory(tmp_path: Path, name: str, backend: str) -> None:
    directory = written(name, tmp_path / "hf")
    expected = logits_of(directory, backend)
    found = logits_of(convert(directory, tmp_path / "x.gguf"), backend)
    if name == "llama3":  # the file has rounded divisors
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    else:
        assert torch.equal(found, expected)


def dequantized(directory: Path, out: Path, name: str) -> Path:
    """Write the float model whose weights are those of a file in the format `name`."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    tensors = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if values.ndim > 1:
            places = np.arange(values.size, dtype=np.float32).reshape(values.shape)
            places = converted(architecture, key, places, config).astype(np.int64)
            rows = quantized(converted(architecture, key, values, config), name)
            values = np.empty_like(values)
            values.ravel()[places.ravel()] = reference(rows, BY_NAME[name]).ravel()
        tensors[key] = torch.from_numpy(values)
    out.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (out / file).write_bytes((directory / file).read_bytes())
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", [name for name in BY_NAME if name != "F32"])
def test_each_format_computes_as_the_floats_that_it_stands_for(tmp_path: Path, format: str) -> None:
    directory = written("llama", tmp_path / "hf", **WIDE)
    expected = logits_of(dequantized(directory, tmp_path / "floats", format), "reference")
    file = convert(directory, tmp_path / "x.gguf", weights=format)
    assert torch.equal(logits_of(file, "reference"), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "phi3", "mistral", "mixtral"])
def test_each_family_is_computed_from_blocks(tmp_path: Path, name: str) -> None:
    scale: dict[str, Any] = {"query_pre_attn_scalar": 64} if name == "gemma3" else {}
    directory = written(name, tmp_path / "hf", **WIDE, **scale)
    expected = logits_of(dequantized(directory, tmp_path / "floats", "Q4_K"), "reference")
    file = convert(directory, tmp_path / "x.gguf", weights="Q4_K")
    assert torch.equal(logits_of(file, "reference"), expected)


def test_gpt2_is_computed_from_blocks(tmp_path: Path) -> None:
    directory = written("gpt2", tmp_path / "hf", n_embd=256)
    expected = logits_of(dequantized(directory, tmp_path / "floats", "Q6_K"), "reference")
    file = convert(directory, tmp_path / "x.gguf", weights="Q6_K")
    assert torch.equal(logits_of(file, "reference"), expected)


def test_formats_are_mixed_within_a_model_and_a_layer(tmp_path: Path) -> None:
    """Values and down projections have more bits, as in "Q4_K_M"."""
    directory = written("llama", tmp_path / "hf", **WIDE)
    formats = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "blk.1.attn_k": "Q5_0"}
    file = convert(directory, tmp_path / "x.gguf", weights="Q4_K", formats=formats)
    found = model_files(file)
    config = found.config()
    with found.weights(config) as weights:
        qkv = next(parts_of(config.layers[1].mixer, Linear)).weights
        names = [weights[tensor].format.name for tensor in qkv]
        assert names == ["Q4_K, pairs of 4 heads", "Q5_0, pairs of 2 heads", "Q6_K"]
        assert weights[config.embedding].format.name == "Q8_0"
        assert weights[config.embedding].group_size == 32
        assert weights[qkv[2]].group_size == 16
        assert weights.dtype == "bfloat16"
    error = (logits_of(file, "reference") - logits_of(directory, "reference")).abs().max()
    assert 0 < error < 3


@pytest.mark.parametrize("format", ["F32", "F16", "Q4_K", "Q6_K"])
def test_any_range_of_rows_of_queries_is_in_the_directorys_order(
    tmp_path: Path, format: str
) -> None:
    directory = written("llama", tmp_path / "hf", **WIDE)
    found = model_files(convert(directory, tmp_path / "x.gguf", weights=format))
    floats = model_files(dequantized(directory, tmp_path / "floats", format))
    config = found.config()
    with found.weights(config) as weights, floats.weights(config) as expected:
        for tensor in next(parts_of(config.layers[0].mixer, Linear)).weights:
            whole = expected[tensor].floats()
            assert np.array_equal(weights[tensor].floats(), whole)
            for first, end in ((0, 1), (31, 33), (60, 100), (len(whole) - 1, len(whole))):
                assert np.array_equal(weights[tensor].floats(first, end), whole[first:end])
                part = weights[tensor].sliced(first, end)
                assert np.array_equal(part.floats(), whole[first:end])


def test_the_tokenizer_and_the_ends_are_the_directorys(tmp_path: Path) -> None:
    directory = written("qwen3", tmp_path / "hf")
    write_byte_level(directory)
    files = model_files(convert(directory, tmp_path / "x.gguf"))
    assert isinstance(files, GGUFModel)
    assert files.why_no_tokenizer() is None
    ours, theirs = files.tokenizer(), model_files(directory).tokenizer()
    text = "def f():\n\treturn 'Grüße, 世界 \x00\x7f'"
    assert len(theirs.encode(text)) < len(text.encode())
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == theirs.vocab_size
    assert files.config().eos_token_ids == (2, 3)
    assert files.chat_template() is None
    assert files.weight_file_bytes() == [(tmp_path / "x.gguf").stat().st_size]


@pytest.mark.asyncio
async def test_a_directory_with_safetensors_as_well_says_that_these_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = written("llama", tmp_path / "hf")
    convert(directory, directory / "x.gguf")
    loaded = await loading.load(
        str(directory), EngineConfig(num_pages=8, max_model_len=32), num_slots=2
    )
    await loaded.runner.aclose()
    said = f"{directory}: holds .safetensors and GGUF; its .safetensors are read."
    assert [said in record.message for record in caplog.records].count(True) == 1
