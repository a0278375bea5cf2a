"""Reads the layouts of compressed-tensors with torch, from their published descriptions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from aioserve.models.quantization.storing import Compressed

__all__ = ["decoded"]


def decoded(
    parts: Mapping[str, np.ndarray | torch.Tensor], method: Compressed, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight that parts of a module stand for, and the scale of each of its numbers; both
    float32 [out, in]. Arrays have the bits of what numpy lacks."""
    tensors = {
        name: torch.as_tensor(np.asarray(part)) if isinstance(part, np.ndarray) else part
        for name, part in parts.items()
    }
    scales = tensors["weight_scale"]
    scales = (scales.view(torch.bfloat16) if scales.dtype == torch.uint16 else scales).float()
    if "weight_packed" in tensors:
        words = tensors["weight_packed"].to(torch.int64) & 0xFFFFFFFF
        in_word = 32 // method.bits
        numbers = torch.stack([words >> method.bits * i for i in range(in_word)], dim=2)
        whole = (numbers & (2**method.bits - 1)) - 2 ** (method.bits - 1)
        values = whole.flatten(1)[:, :columns].float()
    elif method.kind == "float":
        stored = tensors["weight"]
        values = (
            stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored
        ).float()
    else:
        values = tensors["weight"].float()
    each = scales.repeat_interleave(columns // scales.shape[1], dim=1)
    return values * each, each
