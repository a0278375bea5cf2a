"""Readers of the layouts of compressed-tensors, GPTQ and AWQ, in torch.

They follow the published descriptions, and the programs that read these layouts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from aioserve.models.quantization.storing import Compressed

__all__ = ["awq_decoded", "decoded", "gptq_decoded"]

NIBBLES = torch.arange(0, 32, 4)
ORDER_OF_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]
"""Places in AWQ's words of eight outputs, in the order of the outputs."""


def decoded(
    parts: Mapping[str, np.ndarray | torch.Tensor], method: Compressed, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the parts of a module to its weight, and to the scale of each number.

    Both are float32 [out, in]. Arrays hold the bits of dtypes that numpy lacks."""
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


def gptq_decoded(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode a module in GPTQ's first layout, with 4 bits, to its weight, float32 [out, in].

    Words run along the inputs, and words of zero points along the outputs. A zero point is stored
    minus 1, and `g_idx` has the group of each input.
    """
    numbers = (parts["qweight"][:, None, :] >> NIBBLES[None, :, None]) & 15
    zeros = (parts["qzeros"][:, :, None] >> NIBBLES) & 15
    group = parts["g_idx"].long()
    values = numbers.flatten(0, 1) - (zeros.flatten(1) + 1)[group]
    return (values * parts["scales"].float()[group]).T


def awq_decoded(parts: Mapping[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """Decode a module in AWQ's layout "gemm", with 4 bits, to its weight, float32 [out, in].

    Words run along the outputs, eight of which are in an order of their own."""
    numbers, zeros = (
        ((parts[name][:, :, None] >> NIBBLES) & 15)[:, :, ORDER_OF_AWQ].flatten(1)
        for name in ("qweight", "qzeros")
    )
    each = (zeros, parts["scales"].float())
    zero, scale = (part.repeat_interleave(group_size, dim=0) for part in each)
    return ((numbers - zero) * scale).T
