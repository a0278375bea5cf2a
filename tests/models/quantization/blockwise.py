"""Writer of bitsandbytes' checkpoints, number by number, from the papers' descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["FP4", "NF4", "four_bits", "load_in", "storing_eight_bits", "storing_four_bits"]

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Numbers of NF4 ("QLoRA", appendix E)."""
FP4 = tuple(sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3))
"""Numbers of FP4: a sign, two bits of exponent and one of mantissa."""

Parts = dict[str, torch.Tensor]


def load_in(bits: int, **other: Any) -> dict[str, Any]:
    """Make the `quantization_config` that transformers writes."""
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": bits == 4,
        "_load_in_8bit": bits == 8,
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        **other,
    }


def four_bits(
    weight: np.ndarray, kind: str, block: int, *, double: int = 0, storage: str = "uint8"
) -> tuple[Parts, np.ndarray]:
    """Make the parts of a weight, and their floats.

    `double` is the number of scales that share an outer scale; 0: scales are floats."""
    table = np.array(NF4 if kind == "nf4" else FP4, np.float32)
    flat = weight.reshape(-1)
    said: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    scales = _largest(flat, block)
    parts: dict[str, Any] = {"weight.quant_map": table, "weight.absmax": scales}
    if double:
        coarse = np.linspace(-1, 1, 256).astype(np.float32)
        offset = float(scales.mean())
        rest = scales - np.float32(offset)
        outer = _largest(rest, double) + np.float32(1e-9)
        of_each = np.array([outer[i // double] for i in range(len(rest))])
        nearest = np.abs(coarse - (rest / of_each)[:, None]).argmin(axis=1)
        scales = coarse[nearest] * of_each + np.float32(offset)
        parts |= {
            "weight.absmax": nearest.astype(np.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": coarse,
        }
        said |= {"nested_blocksize": double, "nested_dtype": "float32", "nested_offset": offset}
    of_each = np.array([scales[i // block] for i in range(len(flat))])
    codes = np.abs(table - (flat / of_each)[:, None]).argmin(axis=1)
    floats = table[codes] * of_each
    whole = [*codes, 0] if len(codes) % 2 else [*codes]
    packed = [high << 4 | low for high, low in zip(whole[::2], whole[1::2], strict=True)]
    stored = torch.tensor(packed, dtype=torch.uint8).view(getattr(torch, storage))
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
    tensors |= {"weight": stored[:, None], f"weight.quant_state.bitsandbytes__{kind}": state}
    return tensors, floats.reshape(weight.shape)


def _largest(numbers: np.ndarray, block: int) -> np.ndarray:
    starts = range(0, len(numbers), block)
    return np.array([np.abs(numbers[at : at + block]).max() for at in starts], np.float32)


Store = Callable[[str, np.ndarray], tuple[Parts, np.ndarray]]


def storing_four_bits(kind: str, block: int, **how: Any) -> Store:
    return lambda module, weight: four_bits(weight, kind, block, **how)


def storing_eight_bits(module: str, weight: np.ndarray) -> tuple[Parts, np.ndarray]:
    largest = np.abs(weight).max(axis=1).astype(np.float32)
    values = np.rint(weight / largest[:, None] * 127).astype(np.int8)
    parts = {
        "weight": torch.from_numpy(values),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, values.astype(np.float32) * (largest / np.float32(127))[:, None]
