"""Scenarios of tests/ops in the form that the GPU's kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioserve.ops import HostBatch
from aioserve.ops.gpu.gpu_batch import QUERY_BLOCK, GpuBatch, GpuKVLayer, HostPrompts
from aioserve.ops.kv_cache import PlainKVCache
from tests.ops.scenarios import Scenario, plain_cache


class GpuStep(NamedTuple):
    qkv: Tensor
    batch: GpuBatch
    kv: PlainKVCache

    @property
    def at(self) -> GpuKVLayer:
        return GpuKVLayer(self.batch, self.kv, 0)


def gpu_batch(host: HostBatch, device: torch.device, *, num_splits: int = 1) -> GpuBatch:
    """Make a batch for the GPU. Leading sequences with one query token are decodes."""
    counts = np.diff(host.query_start).tolist()
    decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    blocks = [
        (sequence, first)
        for sequence in range(decodes, len(counts))
        for first in range(0, counts[sequence], QUERY_BLOCK)
    ]

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(device)

    return GpuBatch(
        token_ids=upload(host.token_ids),
        positions=upload(host.positions),
        logit_rows=upload(host.logit_rows),
        end_position=host.end_position,
        query_start=upload(host.query_start),
        context_lens=upload(host.context_lens),
        page_tables=upload(host.page_table).unbind(),
        token_locations=upload(host.token_locations).unbind(),
        num_sequences=len(counts),
        num_decodes=decodes,
        query_blocks=upload(np.array(blocks, np.int32).reshape(-1, 2)),
        num_splits=num_splits,
        prompts=HostPrompts(
            np.diff(host.query_start)[decodes:],
            host.context_lens[decodes:],
            host.page_table[:, decodes:],
        ),
    )


def on_gpu(scenario: Scenario, device: torch.device, *, num_splits: int = 1) -> GpuStep:
    """Copy a scenario to a device.

    Keys and values in the fused rows are NaN, since they are in the pages."""
    tokens, _, dim = scenario.q.shape
    kv_heads = scenario.storage.shape[3]
    others = torch.full((tokens, 2 * kv_heads, dim), float("nan"), dtype=scenario.q.dtype)
    qkv = torch.cat([scenario.q, others], dim=1).flatten(1)
    batch = gpu_batch(scenario.host, device, num_splits=num_splits)
    return GpuStep(qkv.to(device), batch, plain_cache(scenario.storage, device))
