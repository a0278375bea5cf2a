"""The few operations that models are made of, as one object per device.

`Backend` says what there is, `reference` is plain torch, `native` is C++ for CPUs, `gpu` is Triton
for NVIDIA GPUs, which nothing imports until one was chosen. Knows tensors; knows nothing about
models, requests or who owns a page.
"""

from __future__ import annotations

from aioserve.config import used_backend
from aioserve.ops.backend import Backend, TensorOps
from aioserve.ops.batch import Batch, Drawn, HostBatch, SampleRows
from aioserve.ops.kv_cache import KVCache, KVShape
from aioserve.ops.layer_ops import Embedding, LayerOps, LogitEdits, StepProgram
from aioserve.ops.linear import Linear
from aioserve.ops.native import NativeBackend
from aioserve.ops.reference import ReferenceBackend

__all__ = [
    "Backend",
    "Batch",
    "Drawn",
    "Embedding",
    "HostBatch",
    "KVCache",
    "KVShape",
    "LayerOps",
    "Linear",
    "LogitEdits",
    "SampleRows",
    "StepProgram",
    "TensorOps",
    "backend_named",
]


def backend_named(name: str = "auto") -> Backend:
    """The backend `name`: "native", "reference", or "auto", as `aioserve.config.used_backend` says.

    Raises:
        ConfigError: there is no backend of that name.
    """
    return NativeBackend() if used_backend(name) == "native" else ReferenceBackend()
