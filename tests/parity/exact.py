"""transformers in float64, where its code says float32 as well: what float32 rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["float64_throughout"]


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Norms, softmax, routers and angles of a model of float64 are float32 by name in transformers.
    In here that name is float64."""
    with_names = {name: getattr(torch, name) for name in ("float32", "float")}
    to_float = torch.Tensor.float
    try:
        for name in with_names:
            setattr(torch, name, torch.float64)
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = to_float
        for name, dtype in with_names.items():
            setattr(torch, name, dtype)
