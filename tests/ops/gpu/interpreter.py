"""Corrections of Triton's interpreter where it differs from a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from aioserve.models.quantization.packing import E4M3
from tests.ops.grouped_integers import fused

__all__ = [
    "correct_products",
    "hasten",
    "round_bfloat16_to_nearest",
    "round_fused_products_once",
]


def round_bfloat16_to_nearest() -> None:
    """Round float32 to bfloat16 to nearest, ties to even, as a GPU does; the interpreter truncates.

    Does nothing if there is a GPU."""
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
    """Multiply the values of bfloat16 and E4M3 operands, with the same bits for a row in any place.

    The interpreter keeps bfloat16 in integers of 16 bits, and `tl.dot` multiplies those. Its
    products use numpy's BLAS, which on some processors sums up a row in an order that depends on
    the number of rows. Here, sums are in float64 and round to the same float32. Does nothing if
    there is a GPU.
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


@cache
def hasten() -> None:
    """Cache work that the interpreter repeats for each call and block, in half of its time.

    Does nothing if there is a GPU."""
    if torch.cuda.is_available():
        return
    _replace_the_language_at_launches()
    _know_numpy_types()
    _know_shapes()


def _replace_the_language_at_launches() -> None:
    """Replace the language once at each launch of a kernel, for all functions that it calls.

    The language is `tl` in kernels, and `core` in functions of Triton's own library."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    replaced: list[tuple[object, str, object]] = []

    def replace_again(kernel: object) -> Any:
        if not replaced:
            scope = replace(both)
            names = dict.fromkeys((place, name) for place, name, _ in scope._changes)
            replaced.extend((place, name, vars(place)[name]) for place, name in names)
            return scope
        scope = interpreter._LangPatchScope()
        for change in replaced:
            scope.set_attr(*change)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = replace_again
    interpreter.InterpretedFunction.__call__ = call


def _know_numpy_types() -> None:
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        scalar = dtype.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = find(scalar)
        return found

    interpreter._get_np_dtype = find_once


def _know_shapes() -> None:
    """Cache types of blocks, and the shapes of blocks of these types, by element and shape."""
    import triton.language as tl

    block_type: Any = tl.core.block_type
    tensor: Any = tl.core.tensor
    make_type, make_tensor = block_type.__init__, tensor.__init__
    known: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}

    def shape_of(dtype: Any) -> tuple[Any, Any]:
        made = object.__new__(tensor)
        make_tensor(made, None, dtype)
        return made.numel, made.shape

    of_scalars = shape_of(tl.float32)

    def know_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        found = known.get(key)
        if found is None:
            make_type(self, element_ty, shape)
            found = known[key] = vars(self) | {"of_tensors": shape_of(self)}
        vars(self).update(found, element_ty=element_ty)

    def know_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    block_type.__init__ = know_type
    tensor.__init__ = know_tensor


@contextmanager
def round_fused_products_once() -> Iterator[None]:
    """Round fused multiply-adds once, where the interpreter rounds the product and the sum.

    Does nothing if there is a GPU."""
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
