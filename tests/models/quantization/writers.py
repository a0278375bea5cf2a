"""Writer of quantised checkpoints, element by element, from the formats' published descriptions.

Weights are random, asymmetric, not square, and have a column of outliers, because uniform weights
would hide mistakes of layout. `floats` returns the dequantised weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from aioserve.testing.random_model import write_random_model

__all__ = ["CONFIG", "Numbers", "matrices", "numbers_of", "pack", "write_quantized"]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Tensors = dict[str, torch.Tensor]


@dataclass
class Numbers:
    """Integers in [0, 2 ** bits), zero points, scales, and the group of each input."""

    values: np.ndarray  # [out, in]
    zeros: np.ndarray  # [out, groups]
    scales: np.ndarray  # float32 [out, groups], each exact in float16
    index: np.ndarray  # [in]
    bits: int

    @property
    def floats(self) -> np.ndarray:
        """Dequantise to float32 [out, in]: the product of an integer and a scale, rounded once."""
        whole = self.values.astype(np.int64) - self.zeros[:, self.index]
        return whole.astype(np.float32) * self.scales[:, self.index]


def numbers_of(
    weight: np.ndarray,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    uneven: bool = False,
    rng: np.random.Generator,
) -> Numbers:
    """Draw random numbers of a weight's size and spread. A `group_size` of -1 means all inputs."""
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    most = 2**bits
    index = np.arange(columns) // size
    if act_order:
        index = rng.permutation(index)
    if uneven:
        index = rng.integers(0, index.max() + 1, columns)
    values = rng.integers(0, most, (rows, columns))
    values[:, rng.integers(columns)] = rng.choice([0, most - 1], rows)
    middle = np.full((rows, groups), most // 2)
    zeros = middle if symmetric else rng.integers(0, most, (rows, groups))
    zeros.flat[0], zeros.flat[-1] = (middle.flat[0],) * 2 if symmetric else (0, most - 1)
    spread = weight.std() / most * 3
    scales = (rng.uniform(0.5, 2, (rows, groups)) * spread).astype(np.float16).astype(np.float32)
    return Numbers(values, zeros, scales, index, bits)


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack the first axis into words of 32 bits, as one long number, lowest word first."""
    count, width = numbers.shape
    num_words = -(-count * bits // 32)
    words = np.zeros((num_words, width), np.uint32)
    for column in range(width):
        whole = sum(int(number) << (bits * i) for i, number in enumerate(numbers[:, column]))
        for word in range(num_words):
            words[word, column] = (whole >> (32 * word)) & 0xFFFFFFFF
    return words.view(np.int32)


def matrices(tensors: Tensors) -> Iterator[str]:
    """Yield the names of quantised modules: linear layers of decoder layers, except routers."""
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ".layers." in name and not name.endswith("gate.weight"):
            yield name.removesuffix(".weight")


def write_quantized(
    directory: Path,
    quantization_config: dict[str, Any],
    store: Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]],
    *,
    config: dict[str, Any] = CONFIG,
) -> tuple[Path, Path]:
    """Write a quantised model and its float model; return both directories.

    `store(module, weight)` returns the parts of a module, by the rest of their names, and its
    dequantised weight.
    """
    model = write_random_model(directory / "quantised", config, dtype="float32")
    floats = write_random_model(directory / "floats", config, dtype="float32")
    tensors, plain = load_file(model / "model.safetensors"), load_file(floats / "model.safetensors")
    for module in list(matrices(tensors)):
        weight = tensors.pop(f"{module}.weight")
        parts, meant = store(module, weight.numpy())
        tensors |= {f"{module}.{rest}": part for rest, part in parts.items()}
        plain[f"{module}.weight"] = torch.from_numpy(meant).contiguous()
    save_file(
        {name: part.contiguous() for name, part in tensors.items()}, model / "model.safetensors"
    )
    save_file(plain, floats / "model.safetensors")
    said = json.loads((model / "config.json").read_text())
    said["quantization_config"] = quantization_config
    (model / "config.json").write_text(json.dumps(said))
    return model, floats
