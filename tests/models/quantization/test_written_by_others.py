"""Checkpoints that other libraries write, compared with their own decoding.

Needs bitsandbytes, accelerate and compressed-tensors, and is skipped without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aioserve.models.files import model_files
from aioserve.models.stored import StoredLinear
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.checking import check_stands_for
from tests.models.quantization.compressed import config_of
from tests.models.quantization.writers import CONFIG, write_quantized

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@contextmanager
def linears(model: Path) -> Iterator[dict[str, StoredLinear]]:
    """Return quantised weights, by names of their modules."""
    files = model_files(model)
    config = files.config()
    with files.weights(config) as stored:
        yield {
            tensor.name.removesuffix(".weight"): stored[tensor]
            for described in config.linears
            for tensor in described.weights
        }


@pytest.mark.parametrize(
    "how",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_quant_storage": torch.bfloat16,
        },
        {"load_in_8bit": True},
    ],
)
def test_weights_of_bitsandbytes(tmp_path: Path, how: dict[str, Any]):
    functional: Any = pytest.importorskip("bitsandbytes").functional
    default: Any = pytest.importorskip("bitsandbytes.backends.default.ops")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = write_random_model(tmp_path / "plain", CONFIG, dtype="bfloat16")
    written: Any = AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=BitsAndBytesConfig(**how),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    written.save_pretrained(tmp_path / "theirs")
    parts = load_file(tmp_path / "theirs" / "model.safetensors")
    with linears(tmp_path / "theirs") as stored:
        for module, ours in stored.items():
            weight = parts[f"{module}.weight"]
            if "load_in_8bit" in how:
                scales = parts[f"{module}.SCB"]
                theirs = functional.int8_vectorwise_dequant(weight, scales)
                assert np.allclose(ours.floats(), theirs.numpy(), rtol=3e-7, atol=0)
                continue
            prefix = f"{module}.weight."
            said = {name: part for name, part in parts.items() if name.startswith(prefix)}
            state = functional.QuantState.from_dict(said, torch.device("cpu"))
            scales = state.absmax
            if state.nested:
                scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
            # Its kernel for CPUs is wrong if blocks cross the ends of rows.
            theirs = default._dequantize_4bit_compute(
                weight.view(torch.uint8).reshape(-1),
                scales,
                state.code,
                state.blocksize,
                state.shape,
                torch.float32,
            )
            assert np.array_equal(ours.floats(), theirs.numpy())


@pytest.mark.parametrize("bits", [4, 8])
def test_microscaled_floats_of_compressed_tensors(tmp_path: Path, bits: int):
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    name = {4: "mxfp4-pack-quantized", 8: "mxfp8-quantized"}[bits]
    said = {
        "num_bits": bits,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    }
    weights = quantization.QuantizationArgs(**said, scale_dtype=torch.uint8)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    largest = {4: 6, 8: 448}[bits]

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        whole = torch.from_numpy(weight.copy())
        groups = whole.unflatten(1, (-1, 32)).abs().amax(2)
        scales = torch.exp2(torch.ceil(torch.log2(groups / largest)))
        parts = compressor.compress({"weight": whole, "weight_scale": scales}, scheme)
        meant = compressor.decompress(dict(parts), scheme)["weight"].float().numpy()
        return {key: part.contiguous() for key, part in parts.items()}, meant

    check_stands_for(*write_quantized(tmp_path, config_of(name, said), store))
