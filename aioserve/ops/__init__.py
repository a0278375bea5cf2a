"""The few operations that models are made of, behind one set of signatures per backend.

`reference` is plain torch, `native` is C++ for CPUs. Knows tensors; knows nothing about models,
requests or who owns a page.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.ops.kv_cache import KVCache, bytes_per_page
from aioserve.ops.types import AttentionBatch

__all__ = ["AttentionBatch", "KVCache", "OpSet", "bytes_per_page", "select"]

BACKENDS = ("native", "reference")


@dataclass(slots=True, frozen=True)
class OpSet:
    """The ops of one backend; `aioserve.ops.reference` documents each."""

    name: str
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    rotary_kv_write: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    gelu_tanh_mul: Callable[..., Tensor]
    copy_pages: Callable[..., None]


def select(name: str = "auto") -> OpSet:
    """The ops of the backend `name`: "native", "reference", or "auto".

    "auto" takes the environment variable AIOSERVE_OPS, and "native" where that is unset.

    Raises:
        ConfigError: there is no backend of that name.
    """
    source = "ops"
    if name == "auto":
        source, name = "AIOSERVE_OPS", os.environ.get("AIOSERVE_OPS") or "native"
    if name == "native":
        from aioserve.ops import native

        return _collect(name, native)
    if name == "reference":
        from aioserve.ops import reference

        return _collect(name, reference)
    raise ConfigError(f"{source} must be one of auto, {', '.join(BACKENDS)}; got {name!r}")


def _collect(name: str, module: ModuleType) -> OpSet:
    return OpSet(
        name=name,
        rms_norm=module.rms_norm,
        add_rms_norm=module.add_rms_norm,
        rotary_kv_write=module.rotary_kv_write,
        paged_attention=module.paged_attention,
        silu_mul=module.silu_mul,
        gelu_tanh_mul=module.gelu_tanh_mul,
        copy_pages=module.copy_pages,
    )
