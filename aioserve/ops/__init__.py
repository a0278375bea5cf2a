"""The few operations that models are made of, as one object per device.

`Backend` says what there is, `reference` is plain torch, `native` is C++ for CPUs, `gpu` is Triton
for NVIDIA GPUs, which nothing imports until one was chosen. Knows tensors; knows nothing about
models, requests or who owns a page.
"""

from __future__ import annotations

from aioserve.ops.backend import Backend
from aioserve.ops.batch import Batch, Drawn, HostBatch, SampleRows
from aioserve.ops.choice import backend_named
from aioserve.ops.edits import LogitEdits, RowMask, leave_out
from aioserve.ops.kv_cache import KVCache, bytes_per_page
from aioserve.ops.layer_ops import Embedding, LayerOps, StepProgram
from aioserve.ops.linear import Linear
from aioserve.ops.tensor_ops import TensorOps

__all__ = [
    "Backend",
    "Batch",
    "Drawn",
    "Embedding",
    "HostBatch",
    "KVCache",
    "LayerOps",
    "Linear",
    "LogitEdits",
    "RowMask",
    "SampleRows",
    "StepProgram",
    "TensorOps",
    "backend_named",
    "bytes_per_page",
    "leave_out",
]
