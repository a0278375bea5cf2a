"""Writer of checkpoints of compressed-tensors and of 8-bit floats, from their descriptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models.quantization.writers import Numbers, numbers_of, pack, write_quantized

__all__ = [
    "Store",
    "config_of",
    "float8",
    "integer_parts",
    "storing",
    "storing_blocks",
    "weights_of",
    "write_mixture",
]

Store = Callable[[str, np.ndarray], tuple[dict[str, torch.Tensor], np.ndarray]]


def weights_of(bits: int, group_size: int | None = None, **other: Any) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    said = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size}
    return said | {"symmetric": False, **other}


def config_of(format_: str, weights: dict[str, Any], **other: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **other,
    }


def integer_parts(numbers: Numbers, *, packed: bool, zeros: str = "packed") -> dict[str, Any]:
    """Make the parts of a weight of integers. `zeros` is "packed" or "plain"."""
    middle = 2 ** (numbers.bits - 1)
    parts: dict[str, Any] = {"weight_scale": numbers.scales.astype(np.float16)}
    if packed:
        parts["weight_packed"] = pack(numbers.values.T, numbers.bits).T
        parts["weight_shape"] = np.array(numbers.values.shape, np.int64)
    else:
        parts["weight"] = (numbers.values - middle).astype(np.int8)
    if zeros == "packed" and packed:
        parts["weight_zero_point"] = pack(numbers.zeros, numbers.bits)
    else:
        parts["weight_zero_point"] = (numbers.zeros - middle).astype(np.int8)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def storing(bits: int, group_size: int, **how: Any) -> Store:
    rng = np.random.default_rng(bits)
    symmetric = how.pop("symmetric", False)
    act_order = how.pop("act_order", False)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        numbers = numbers_of(
            weight, bits, group_size, symmetric=symmetric, act_order=act_order, rng=rng
        )
        parts = integer_parts(numbers, **how)
        if symmetric:
            del parts["weight_zero_point"]
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(numbers.index.astype(np.int32))
        return parts, numbers.floats

    return store


def float8(weight: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Round a weight to E4M3 with a scale for each number. Returns it and its floats."""
    narrow = torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)
    return narrow, narrow.float().numpy() * scales


def expanded(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    whole = np.empty(shape, np.float32)
    for row, column in np.ndindex(*shape):
        whole[row, column] = scales[row // block[0], column // block[1]]
    return whole


def storing_blocks(block: tuple[int, int], name: str, kind: str = "float") -> Store:
    rng = np.random.default_rng(3)

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        shape = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        exponents = rng.integers(118, 123, shape).astype(np.uint8)
        scales = rng.uniform(0.001, 0.01, shape).astype(np.float32)
        stored = torch.from_numpy(scales)
        if kind != "float":
            scales = np.exp2(exponents.astype(np.float32) - 127)
            stored = torch.from_numpy(exponents)
            stored = stored.view(torch.float8_e8m0fnu) if kind == "e8m0" else stored
        narrow, floats = float8(weight, expanded(scales, weight.shape, block))
        return {"weight": narrow, name: stored}, floats

    return store


def write_mixture(directory: Path) -> tuple[Path, Path]:
    """Write a model in several formats, and its float model, as `write_quantized` does.

    Queries and keys have 4 bits, values 8 bits. Gates stay plain, and the rest are 8-bit floats."""
    four, eight = storing(4, 32, packed=True), storing(8, -1, packed=False)
    floats = storing_blocks((32, 16), "weight_scale")

    def store(module: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        if module.endswith("gate_proj"):
            return {"weight": torch.from_numpy(weight)}, weight
        chosen = {"v": eight, "q": four, "k": four}.get(module.rpartition(".")[2][0], floats)
        return chosen(module, weight)

    said = config_of("mixed-precision", weights_of(4, 32))
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]}
    said["ignore"] = ["lm_head", r"re:.*gate_proj$"]
    said["config_groups"] = {
        "rest": {"targets": ["Linear"], "weights": block, "format": "float-quantized"},
        "attention": {
            "targets": [r"re:.*self_attn\.[qkv]_proj"],
            "weights": weights_of(4, 32),
            "format": "pack-quantized",
        },
        "values": {
            "targets": [f"model.layers.{i}.self_attn.v_proj" for i in range(2)],
            "weights": weights_of(8),
            "format": "int-quantized",
        },
    }
    return write_quantized(directory, said, store)
