"""Scenarios of tests/ops, prepared by `CudaBackend`, for attention that plans on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.attention import paged_attention
from aioserve.ops.gpu.attention_tiles import AttentionTiles
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.gpu_batch import GpuBatch, GpuKVLayer
from tests.ops.scenarios import Scenario, plain_cache

__all__ = ["Prepared", "assert_close"]


class Prepared:
    """Scenario that is copied to a device.

    Keys and values in the fused rows are NaN, since they are in the pages."""

    def __init__(self, scenario: Scenario, device: torch.device, tiles: AttentionTiles) -> None:
        backend = CudaBackend(device)
        self._tiles = tiles
        self.kv = plain_cache(scenario.storage, device)
        prepared = backend.prepare(scenario.host, self.kv, backend.allocate_slots(1))
        assert isinstance(prepared, GpuBatch)
        self.batch: GpuBatch = prepared
        tokens, _, dim = scenario.q.shape
        others = torch.full((tokens, 2 * self.kv.num_kv_heads, dim), float("nan"))
        qkv = torch.cat([scenario.q, others.to(scenario.q.dtype)], dim=1).flatten(1)
        self.qkv: Tensor = qkv.to(device)

    def rows(
        self, prompts: Any = None, *, scale: float = 0.125, window: int = 0, soft_cap: float = 0.0
    ) -> Tensor:
        at, kind = GpuKVLayer(self.batch, self.kv, 0), AttentionKind(scale, window, soft_cap)
        return paged_attention(self.qkv, at, kind, tiles=self._tiles, prompts=prompts)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Compare within the rounding of the dtype."""
    unit = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=4 * unit, atol=4 * unit)
