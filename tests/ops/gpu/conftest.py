"""Device on which the GPU's kernels are tested. Without a GPU, it is Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.ops.gpu.interpreter import correct_products, hasten

# Triton has no packages for anything but Linux on x86-64 and arm64.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


if not collect_ignore_glob:
    correct_products()
    hasten()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
