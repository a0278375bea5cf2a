"""Parts of blocks: norms, and loaded weights placed on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from aioserve.models import architecture
from aioserve.models.reading import TakenWeights
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, Linear
from aioserve.ops.backend import LayerNorm, RMSNorm
from aioserve.ops.layer_ops import RowOps

__all__ = ["Norm", "Weights", "rms_norm"]


X = TypeVar("X")


class Weights:
    """Loaded weights, which blocks take from here and place on a backend. Each is taken once."""

    def __init__(self, read: TakenWeights, backend: Backend) -> None:
        self.backend = backend
        self.dtype: torch.dtype = getattr(torch, read.dtype)
        self._read = read
        self._tables: dict[RopeConfig, RotaryTable] = {}
        self.linears: dict[architecture.Linear, Linear] = {}
        """Linear layers made so far."""

    def linear(
        self, described: architecture.Linear, out_dtype: torch.dtype | None = None
    ) -> Linear:
        held = self._read.linears.pop(described, None)
        if held is not None:
            made = self.backend.linear(held, out_dtype=out_dtype)
        else:
            weight = self._stacked(described.weights, described.transposed)
            bias = self._stacked(described.biases) if described.biases else None
            made = self.backend.linear(weight, bias, out_dtype=out_dtype)
        self.linears[described] = made
        return made

    def vector(self, tensor: architecture.Tensor) -> Tensor:
        return self.backend.place(self._tensor(tensor))

    def take(self, tensor: architecture.Tensor) -> Tensor:
        """Take a tensor out, on the CPU, for a block to transform before it places it."""
        taken = self._tensor(tensor)
        del self._read.arrays[tensor]
        return taken

    def rotary(self, rope: RopeConfig) -> RotaryTable:
        """Table for `rope`, shared by all layers with equal settings."""
        if rope not in self._tables:
            limit = self._read.max_model_len
            self._tables[rope] = RotaryTable(rope, limit, self.backend.device)
        return self._tables[rope]

    @property
    def rotary_tables(self) -> tuple[RotaryTable, ...]:
        """Tables that blocks have requested."""
        return tuple(self._tables.values())

    def _stacked(self, tensors: Sequence[architecture.Tensor], transposed: bool = False) -> Tensor:
        stored = [self._tensor(tensor) for tensor in tensors]
        return torch.cat([tensor.T for tensor in stored] if transposed else stored)

    def _tensor(self, tensor: architecture.Tensor) -> Tensor:
        array = torch.from_numpy(self._read.arrays[tensor])
        return array if tensor.is_wide else array.view(self.dtype)


class Norm:
    """An RMS norm or a LayerNorm."""

    def __init__(self, described: architecture.Norm, weights: Weights) -> None:
        self._norm: RMSNorm | LayerNorm
        if described.centered:
            self._norm = _layer_norm(described, weights)
        else:
            self._norm = rms_norm(described, weights)

    def __call__(self, ops: RowOps[X], x: X, residual: X | None = None) -> X:
        """[T, H] -> [T, H]: norm of x, or of `residual` after an in-place `residual += x`."""
        if isinstance(self._norm, RMSNorm):
            return ops.rms_norm(x, self._norm, residual)
        return ops.layer_norm(x, self._norm, residual)


def rms_norm(described: architecture.Norm, weights: Weights) -> RMSNorm:
    return RMSNorm(weights.vector(described.weight), described.eps, described.weight_offset)


def _layer_norm(described: architecture.Norm, weights: Weights) -> LayerNorm:
    weight = weights.vector(described.weight)
    if described.weight_offset:
        weight = weight + described.weight_offset  # rounded as in transformers
    bias = None if described.bias is None else weights.vector(described.bias)
    return LayerNorm(weight, bias, described.eps)
