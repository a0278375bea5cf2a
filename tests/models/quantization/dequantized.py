"""Float model of dequantised weights, which a quantised model must match."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from aioserve.models.files import model_files
from aioserve.models.quantization.while_loading import QuantizedWhileLoading

__all__ = ["write_dequantized"]


def write_dequantized(model: Path, to: Path, quantization: str | None = None) -> Path:
    """Write the weights of `model` as float32 to `to`, with a config.json without quantisation.

    `quantization` is the engine's option, by which weights are rounded while they are loaded."""
    files = model_files(model)
    config = files.config()
    with files.weights(config) as stored:
        weights = stored
        if quantization is not None:
            weights = QuantizedWhileLoading(stored, config, quantization)
        tensors = {}
        for tensor in (*config.required, config.head):
            if tensor not in weights:
                continue
            floats = torch.from_numpy(weights[tensor].floats())
            floats = floats.T if tensor.transposed else floats.reshape(tensor.shape)
            tensors[tensor.name] = floats.contiguous()
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(tensors, to / "model.safetensors")
    said = json.loads((to / "config.json").read_text())
    said.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(said | {"torch_dtype": "float32"}))
    return to
