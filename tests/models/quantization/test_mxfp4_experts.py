"""GPT-OSS in its own format: all experts of a layer in one tensor of MXFP4, the rest plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve.errors import WeightsError
from aioserve.models.architecture import Experts, parts_of
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.checking import PROMPT, check_stands_for, logits_of
from tests.parity.tiny_models import CONFIGS

CONFIG = CONFIGS["gpt-oss"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 6,
}
SAID = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round a weight [..., out, in] to MXFP4. Returns blocks, scales, and their floats."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1, keepdims=True))) - 2
    scaled = groups / 2**exponents
    codes = np.abs(np.abs(scaled)[..., None] - NUMBERS).argmin(-1)
    floats = np.copysign(NUMBERS[codes], scaled) * 2**exponents
    codes = codes + 8 * np.signbit(scaled)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    scales = (exponents[..., 0] + 127).astype(np.uint8)
    return blocks, scales, floats.reshape(weight.shape).astype(np.float32)


def write(directory: Path) -> tuple[Path, Path]:
    """Write the model in MXFP4, and its float model."""
    plain = write_random_model(directory / "plain", CONFIG, dtype="float32")
    tensors = load_file(plain / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    floats = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        blocks, scales, numbers = quantized(tensor.transpose(1, 2).numpy())
        packed[f"{name}_blocks"] = torch.from_numpy(blocks).contiguous()
        packed[f"{name}_scales"] = torch.from_numpy(scales).contiguous()
        floats[name] = torch.from_numpy(numbers).transpose(1, 2).contiguous()
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    model = write_random_model(directory / "mxfp4", CONFIG, dtype="float32")
    save_file(packed, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": SAID}
    (model / "config.json").write_text(json.dumps(config))
    return model, plain


def test_experts_of_four_bits_stand_for_their_floats(tmp_path: Path) -> None:
    check_stands_for(*write(tmp_path))


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    model, _ = write(tmp_path)
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        model,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    with torch.inference_mode():
        expected = oracle.float().eval()(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, "reference"), expected, rtol=1e-4, atol=1e-4)


def test_experts_stay_in_four_bits(tmp_path: Path) -> None:
    model, _ = write(tmp_path)
    decoder = load_model(model, dtype="bfloat16", backend=backend_named("native"))
    (first, *_) = parts_of(decoder.config.layers, Experts)
    up = decoder.linears[first.experts[0].up]
    values = up.in_features * up.out_features
    # A scale of 2 bytes for each 32 numbers, and a bias.
    assert up.num_bytes <= values / 2 + values / 32 * 4 + 4 * up.out_features + 4096


def test_a_model_in_bfloat16_is_read_alike(tmp_path: Path) -> None:
    narrow = write_random_model(tmp_path / "narrow", CONFIG, dtype="bfloat16")
    for backend in ("native", "reference"):
        wide = logits_of(narrow, backend)
        assert wide.isfinite().all()
    torch.testing.assert_close(logits_of(narrow, "native"), logits_of(narrow, "reference"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_blocks", lambda one: one[:, :, :1], r"gate_up_proj_blocks\[0\] has shape"),
        ("down_proj_scales", lambda one: one[:3], r"the weights lack .*experts.3.down_proj"),
        ("down_proj_scales", None, r"the weights lack .*experts.0.down_proj.weight_scale"),
        ("gate_up_proj_bias", lambda one: one[:, :5], r"gate_up_proj_bias\[0\] has shape \[5\]"),
    ],
)
def test_stacks_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, change: Any, message: str
) -> None:
    model, _ = write(tmp_path)
    tensors = load_file(model / "model.safetensors")
    key = f"model.layers.1.mlp.experts.{name}"
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    files = model_files(model)
    with pytest.raises(WeightsError, match=message):
        files.weights(files.config())
