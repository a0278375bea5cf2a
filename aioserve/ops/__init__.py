"""Operations that models are made of, as one object per device.

`Backend` is the contract, `reference` is plain torch, and `native` is C++ for CPUs. Triton's
kernels for NVIDIA GPUs are in `gpu`; nothing imports it until a GPU is chosen. Knows tensors; must
not know models, requests or the owners of pages.
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
    """Return the backend `name`: "native", "reference", or "auto" (see
    `aioserve.config.used_backend`).

    Raises:
        ConfigError: there is no backend of that name.
    """
    return NativeBackend() if used_backend(name) == "native" else ReferenceBackend()
