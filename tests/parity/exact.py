"""Models of transformers in float64, including the operations that its code does in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["float64_throughout"]


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Make the name float32 mean float64.

    In transformers, norms, softmax, routers and angles use float32 by name in any model."""
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
