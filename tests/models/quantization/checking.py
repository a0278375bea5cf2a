"""Checks that a quantised model computes the same as its dequantised float model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch

from aioserve.formats.weights import NATIVE
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.models.reading import WeightReading
from aioserve.models.weight_integers import WeightIntegers
from aioserve.ops import backend_named
from aioserve.ops.native_types import NativeLinear
from tests.parity.paged import PagedRun

__all__ = ["check_computes", "check_stands_for", "logits_of"]

PROMPT = [5, 9, 200, 31, 77, 8, 120, 3, 150]


def check_stands_for(model: Path, floats: Path) -> None:
    """Check that every weight decodes to the floats, bit for bit, and that logits match.

    Weights are decoded whole and in pieces that begin anywhere, in the form of their description.
    """
    files, plain_files = model_files(model), model_files(floats)
    config = files.config()
    with files.weights(config) as stored, plain_files.weights(plain_files.config()) as plain:
        for described in config.rounded_linears:
            for tensor in described.weights:
                one, meant = stored[tensor], plain[tensor].floats()
                assert np.array_equal(one.floats(), meant), one.name
                for first in (1, 5, len(meant) // 2):
                    end = first + max(1, (len(meant) - first) // 2)
                    assert np.array_equal(one.floats(first, end), meant[first:end])
                    assert np.array_equal(one.sliced(first, end).floats(), meant[first:end])
                rows, form = one.rows(), one.integers
                assert isinstance(rows, WeightIntegers) == (form is not None)
                if form is not None and isinstance(rows, WeightIntegers):
                    assert rows.bits == form.bits
                    assert rows.group_size == form.group_size
                    assert (rows.zeros is not None) == form.has_minimums
    check_computes(model, floats)


def check_computes(model: Path, floats: Path, quantization: str | None = None) -> None:
    """Check the logits of a quantised model on the reference and on the native backend.

    The reference gives the float model's logits, bit for bit. The native backend holds the same
    weights and biases, and its products are as close as 8-bit activations allow. If activations
    stay floats, its logits equal the float model's, bit for bit."""
    assert torch.equal(
        logits_of(model, "reference", quantization=quantization), logits_of(floats, "reference")
    )
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(
                WeightReading(
                    model_files(path), dtype="float32", formats=NATIVE, quantization=method
                )
            ).read()
            for path, method in ((model, quantization), (floats, None))
        )
        for described, kernel in ours.linears.items():
            exact = NativeLinear.of_packed(theirs.linears[described])
            _check_layer(NativeLinear.of_packed(kernel), exact)
    for dtype in ("float32", "bfloat16"):
        _check_in_floats(model, floats, quantization, dtype)
    integers, exact = logits_of(model, quantization=quantization), logits_of(floats)
    error = (integers - exact).abs()
    assert error.square().mean().sqrt() < 0.2 * exact.std()
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * error.max()
    assert torch.equal(integers.argmax(1)[clear], exact.argmax(1)[clear])


def _check_in_floats(model: Path, floats: Path, quantization: str | None, dtype: str) -> None:
    formats = msgspec.structs.replace(NATIVE, integer_activations=False)
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(
                WeightReading(model_files(path), dtype=dtype, formats=formats, quantization=method)
            ).read()
            for path, method in ((model, quantization), (floats, None))
        )
        for described, kernel in ours.linears.items():
            layer, exact = (
                NativeLinear.of_packed(one) for one in (kernel, theirs.linears[described])
            )
            every = torch.arange(layer.out_features)
            assert torch.equal(layer.rows(every), exact.rows(every))
            x = torch.randn(20, layer.in_features, generator=torch.Generator().manual_seed(7))
            for rows in (1, 5, 20):
                some = x[:rows].to(layer.dtype)
                assert torch.equal(layer(some), exact(some))


def _check_layer(layer: NativeLinear, exact: NativeLinear) -> None:
    every = torch.arange(layer.out_features)
    weight = exact.rows(every)
    # The product of a zero point and a scale is rounded separately.
    close = 1e-6 * weight.abs().max().item()
    torch.testing.assert_close(layer.rows(every), weight, rtol=1e-6, atol=close)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(7))
    x[:, 3] *= 20
    largest = [part.abs().amax(1) for part in x.split(128, dim=1)]
    off = sum(
        amax[:, None] / 254 * part.abs().sum(1)
        for amax, part in zip(largest, weight.split(128, dim=1), strict=True)
    )
    off = off + 1e-5 * (x.abs() @ weight.abs().T)
    assert ((layer(x) - exact(x)).abs() <= off).all()


def logits_of(
    directory: Path, backend: str = "native", *, quantization: str | None = None
) -> torch.Tensor:
    decoder = load_model(
        directory, dtype="float32", backend=backend_named(backend), quantization=quantization
    )
    return PagedRun(decoder).step({"a": PROMPT})["a"]
