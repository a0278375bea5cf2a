"""What Triton's interpreter does unlike a GPU, put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from aioserve.models.quantization.packing import E4M3
from tests.ops.grouped_integers import fused

__all__ = ["correct_products", "round_bfloat16_to_nearest", "round_fused_products_once"]


def round_bfloat16_to_nearest() -> None:
    """The interpreter cuts the lower half of a float32 off; a GPU rounds to the nearest, to even
    between two. Nothing is done where there is a GPU."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    interpreted = interpreter.InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return interpreted(self, source, dtype)
        bits = np.ascontiguousarray(source.data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    interpreter.InterpreterBuilder.create_fp_trunc = create_fp_trunc  # pyright: ignore[reportAttributeAccessIssue]


def correct_products() -> None:
    """Multiply what operands of bfloat16 and E4M3 stand for, and each row alike wherever it stands.
    Nothing is done where there is a GPU.

    The interpreter keeps bfloat16 in integers of 16 bits, and `tl.dot` multiplies those. And it
    leaves products to numpy's BLAS, which on some processors adds up a row in another order where
    another number of rows comes with it. Summed in float64, they are rounded to the same float32.
    """
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    interpreted = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if operand.dtype.scalar == tl.float8e4nv:
            return E4M3[operand.data.view(np.uint8)].astype(np.float64)
        return operand.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        if not (a.dtype.scalar.is_floating() and b.dtype.scalar.is_floating()):
            return interpreted(self, a, b, d, *others)
        product = np.matmul(widened(a), widened(b)).astype(d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def round_fused_products_once() -> Iterator[None]:
    """The interpreter rounds a fused product, and then the sum. Nothing is done where there is a
    GPU."""
    if torch.cuda.is_available():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    interpreted = interpreter.InterpreterBuilder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.float32:
            return interpreted(self, x, y, z)
        return interpreter.TensorHandle(fused(x.data, y.data, z.data), tl.float32)

    interpreter.InterpreterBuilder.create_fma = create_fma
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_fma = interpreted
