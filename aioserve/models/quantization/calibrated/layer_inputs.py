"""Inputs of each linear layer of a model while it computes windows of text.

All windows are one batch, so that layers are computed one after the other, each for all tokens.
Later layers therefore see the changes of earlier ones. It takes the memory of the weights as
floats, keys and values of one layer, and activations. For each token, these are at most about three
times the outputs of the widest linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.errors import ConfigError, ModelError
from aioserve.models import architecture
from aioserve.models.architecture import parts_of
from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from aioserve.ops import HostBatch, Linear, TensorOps
from aioserve.ops.checks import AttentionKind, HeadNorms
from aioserve.ops.layer_ops import RotarySource
from aioserve.ops.reference import ReferenceBackend
from aioserve.paging.layout import kv_layout

__all__ = ["Visit", "Windows", "second_moments", "show_inputs"]

Windows = Sequence[npt.NDArray[np.int64]]
"""Token ids of independent texts."""

Visit = Callable[[architecture.Linear, Linear, Tensor], Linear]
"""Function called with each linear layer except the head, and with its inputs `[tokens, in]`.

Calls are in the order of the computation. It returns the layer to compute with: the same one, or a
replacement."""

_ROWS = 4096
"""Number of rows that are computed at once to save memory."""


def show_inputs(model: Path, windows: Windows, visit: Visit) -> None:
    """Compute the windows in the dtype of the model's weights, on the reference backend.

    Raises `ConfigError` for a mixture of experts, `ModelError` if the model computes NaN or
    infinity, and the errors of `load_model`.
    """
    decoder = load_model(model, backend=ReferenceBackend(), use_program=False)
    if any(parts_of(decoder.config.layers, architecture.Experts)):
        raise ConfigError(
            f"{model}: its experts see some of the tokens each, and no text calibrates all of "
            f"them: use a method without a text",
            argument="model",
        )
    counts = np.array([len(window) for window in windows])
    pages = np.arange(len(windows), dtype=np.int32)[None, :, None]
    rows = np.arange(counts.sum())
    host = HostBatch.laid_out(counts, counts, pages, int(counts.max()), logit_rows=rows)
    host = replace(host, token_ids=np.concatenate(windows))
    with torch.inference_mode():
        decoder.hidden_states(_ShownOps(decoder, host, visit))


def second_moments(x: Tensor) -> Tensor:
    """Compute the mean of `row.T @ row` over the rows of x `[tokens, in]`: float32 `[in, in]`."""
    total = torch.zeros(x.shape[1], x.shape[1], device=x.device)
    for part in x.split(_ROWS):
        wide = part.float()
        total.addmm_(wide.T, wide)
    return total / len(x)


class _ShownOps(TensorOps):
    __slots__ = ("_described", "_visit")

    def __init__(self, decoder: Decoder, host: HostBatch, visit: Visit) -> None:
        # Each layer reads only the KV that it has just written, so that all can share one place.
        shape = decoder.kv_shape(len(host.context_lens), int(host.context_lens.max()))
        layout = kv_layout(decoder.config.kv_layers(decoder.kv_format)[:1], 1)
        kv = decoder.backend.allocate_kv(shape._replace(layout=layout))
        nothing_pending = decoder.backend.allocate_slots(1)
        decoder.cover(host.end_position)
        super().__init__(decoder.backend, decoder.backend.prepare(host, kv, nothing_pending), kv)
        self._described = {layer: described for described, layer in decoder.linears.items()}
        self._visit = visit

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        described = self._described[layer]
        if not x.isfinite().all():
            raise ModelError(
                f"the model computes NaN or infinity before {described.weights[0].name}, with "
                f"this text to calibrate on"
            )
        return self._visit(described, layer, x)(x)

    def rotary_kv_write(
        self, qkv: Tensor, layer: int, rotary: RotarySource | None, norms: HeadNorms | None
    ) -> None:
        super().rotary_kv_write(qkv, 0, rotary, norms)

    def paged_attention(
        self, qkv: Tensor, layer: int, kind: AttentionKind, *, logit_rows_only: bool
    ) -> Tensor:
        return super().paged_attention(qkv, 0, kind, logit_rows_only=logit_rows_only)

    def gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        return torch.cat([self._backend.gated(part, gelu=gelu) for part in gate_up.split(_ROWS)])
