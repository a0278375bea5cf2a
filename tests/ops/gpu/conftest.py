"""The device that the GPU's kernels are tested on: Triton's interpreter where there is no GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

# Triton has no packages for anything but Linux on x86-64 and arm64.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def _correct_products_of_bfloat16() -> None:
    """Multiply what bfloat16 operands stand for.

    The interpreter keeps bfloat16 in integers of 16 bits, and `tl.dot` multiplies those.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreted = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return interpreted(self, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot  # pyright: ignore[reportAttributeAccessIssue]


if not torch.cuda.is_available() and not collect_ignore_glob:
    _correct_products_of_bfloat16()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
