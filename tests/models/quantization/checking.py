"""A quantised model computes what the float model that it stands for does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from aioserve.models.files import model_files
from aioserve.models.grouped import GroupedIntegers
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from tests.parity.paged import PagedRun

__all__ = ["check_stands_for"]

PROMPT = [5, 9, 200, 31, 77, 8, 120, 3, 150]


def check_stands_for(model: Path, floats: Path) -> None:
    """Every weight decodes bit for bit, whole and in pieces that begin anywhere, in the form that
    its description says; and the logits are those of the float model."""
    files, plain_files = model_files(model), model_files(floats)
    config = files.config()
    with files.weights(config) as stored, plain_files.weights(plain_files.config()) as plain:
        for described in config.linears:
            for tensor in described.weights:
                one, meant = stored[tensor], plain[tensor].floats()
                assert np.array_equal(one.floats(), meant), one.name
                for first in (1, 5, len(meant) // 2):
                    end = first + max(1, (len(meant) - first) // 2)
                    assert np.array_equal(one.floats(first, end), meant[first:end])
                    assert np.array_equal(one.sliced(first, end).floats(), meant[first:end])
                rows, form = one.rows(), one.integers
                assert isinstance(rows, GroupedIntegers) == (form is not None)
                if form is not None and isinstance(rows, GroupedIntegers):
                    assert rows.bits == form.bits
                    assert rows.group_size == form.group_size
                    assert (rows.zeros is not None) == form.has_minimums
    for name in ("reference", "native"):
        quantised = _logits(model, name)
        assert quantised.isfinite().all()
        assert torch.equal(quantised, _logits(floats, name))


def _logits(directory: Path, backend: str) -> torch.Tensor:
    decoder = load_model(directory, dtype="float32", backend=backend_named(backend))
    return PagedRun(decoder).step({"a": PROMPT})["a"]
