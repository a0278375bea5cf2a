"""Checks of the arg-max of linear layers, for weights of all formats."""

from __future__ import annotations

import torch
from torch import Tensor

from aioserve.ops.native import NativeLinear

UNTOUCHED = 123.0


def argmax(layer: NativeLinear, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest outputs, their columns, and the outputs of `kept` rows; None: all."""
    largest = torch.full((x.shape[0],), UNTOUCHED)
    columns = torch.full((x.shape[0],), -1)
    outputs = torch.full((x.shape[0], layer.out_features), UNTOUCHED)
    row_bytes = x.stride(0) * x.element_size()
    kept_at = 0 if kept is None else kept.data_ptr()
    results = outputs.data_ptr(), kept_at, largest.data_ptr(), columns.data_ptr()
    layer.packed.argmax(x.data_ptr(), x.shape[0], row_bytes, *results)
    return largest, columns, outputs


def assert_argmax_is_that_of_the_outputs(layer: NativeLinear, x: Tensor) -> None:
    outputs = layer(x)
    kept = torch.arange(x.shape[0]) % 3 == 1
    largest, columns, written = argmax(layer, x, kept)
    assert torch.equal(written[kept].view(torch.int32), outputs[kept].view(torch.int32))
    assert bool((written[~kept] == UNTOUCHED).all())
    every = argmax(layer, x, None)[2]
    assert torch.equal(every.view(torch.int32), outputs.view(torch.int32))
    expected = torch.from_numpy(outputs.numpy().argmax(axis=1))
    assert torch.equal(columns, expected)
    values = outputs.gather(1, expected[:, None])[:, 0]
    assert torch.equal(largest.view(torch.int32), values.view(torch.int32))
