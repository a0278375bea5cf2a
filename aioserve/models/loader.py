"""From a model directory to a `Decoder`: reads, converts, fuses and packs the weights.

Tensors are read one at a time from mapped files and packed at once, so that peak memory stays near
the size of the packed model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from aioserve.errors import ConfigError, ModelNotFoundError
from aioserve.models.checkpoint import Checkpoint
from aioserve.models.config import DecoderConfig
from aioserve.models.decoder import Decoder, DecoderLayer, DecoderWeights, Norm
from aioserve.models.layout import (
    LayerLayout,
    LinearLayout,
    ModelLayout,
    NormLayout,
    Tensor,
    layout_of,
)
from aioserve.ops import select
from aioserve.ops.linear import PackedLinear, pack_linear

__all__ = ["Progress", "load_model"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) after each tensor."""

TWO_COPIES_BYTES = 64 << 20
"""An embedding that is the output layer too is kept once, packed, if it is larger than this. Rows
of packed weights are slower to read, which shows in small models."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype | str = "auto",
    ops: str = "auto",
    progress: Progress | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Load the Hugging Face model in the directory `path`.

    dtype: float32 or bfloat16, of weights, activations and KV pages. "auto" is the checkpoint's;
        a float16 checkpoint becomes float32, which holds its values exactly.
    ops: the backend, see `aioserve.ops.select`.
    max_model_len: longest context in tokens to be served; None: all the model has. With longrope it
        also chooses between the factors for short and for long contexts.

    Raises:
        ModelNotFoundError: no such directory.
        UnsupportedModelError: an architecture or setting that isn't implemented.
        WeightsError: no weights, or a file or tensor missing, broken or of the wrong shape.
        ModelError: a malformed file.
        ConfigError: an argument outside its range.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelNotFoundError(f"{directory}: no such directory")
    config = DecoderConfig.from_directory(directory)
    limit = config.max_position_embeddings
    length = limit if max_model_len is None else max_model_len
    if not 1 <= length <= limit:
        raise ConfigError(f"max_model_len must be in [1, {limit}] for this model, got {length}")
    op_set = select(ops)
    layout = layout_of(config)
    tied = config.tie_word_embeddings
    with Checkpoint(directory, layout, head_required=not tied) as checkpoint, torch.no_grad():
        chosen = _choose_dtype(dtype, config, checkpoint)
        weights = _Reader(checkpoint, chosen, progress).weights(layout, tied)
    return Decoder(config, weights, op_set, length)


def _choose_dtype(
    dtype: torch.dtype | str, config: DecoderConfig, checkpoint: Checkpoint
) -> torch.dtype:
    if dtype != "auto":
        chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if chosen is None or chosen not in _DTYPES.values():
            raise ConfigError(f"dtype must be auto, {' or '.join(_DTYPES)}, got {dtype}")
        return chosen
    if config.dtype is None:
        stored = checkpoint.dtype
        return stored if stored in _DTYPES.values() else torch.float32
    return _DTYPES.get(config.dtype, torch.float32)


class _Reader:
    """Reads tensors of one checkpoint into `dtype`, counting bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._done_bytes = 0

    def weights(self, layout: ModelLayout, tied: bool) -> DecoderWeights:
        embedding = self._copy(layout.embedding)
        head, shared = self._head(layout.head, embedding, tied)
        packed_alone = shared and embedding.nbytes > TWO_COPIES_BYTES
        embed = head.rows if packed_alone else _lookup(embedding)
        del embedding
        return DecoderWeights(
            embed=embed,
            dtype=self._dtype,
            positions=None if layout.positions is None else self._copy(layout.positions),
            layers=tuple(self._layer(layer) for layer in layout.layers),
            final_norm=self._norm(layout.final_norm),
            head=head,
        )

    def _layer(self, layout: LayerLayout) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self._norm(layout.attention_norm),
            qkv=self._linear(layout.qkv),
            query_norm=self._optional_weight(layout.query_norm),
            key_norm=self._optional_weight(layout.key_norm),
            output=self._linear(layout.output),
            attention_post_norm=self._optional_norm(layout.attention_post_norm),
            mlp_norm=self._norm(layout.mlp_norm),
            up=self._linear(layout.up),
            down=self._linear(layout.down),
            mlp_post_norm=self._optional_norm(layout.mlp_post_norm),
        )

    def _head(self, head: Tensor, embedding: torch.Tensor, tied: bool) -> tuple[PackedLinear, bool]:
        """The output layer, and whether it is the embedding."""
        weight = embedding
        if head in self._checkpoint:
            # Some files store the tied head once more. Where it differs from the embedding the
            # file is right and config.json isn't; transformers decides the same.
            own = self._copy(head)
            weight = embedding if tied and torch.equal(own, embedding) else own
        return pack_linear(weight, out_dtype=torch.float32), weight is embedding

    def _linear(self, layout: LinearLayout) -> PackedLinear:
        weight = self._stack(layout.weights, layout.transposed)
        bias = self._stack(layout.biases, False) if layout.biases else None
        return pack_linear(weight, bias)

    def _norm(self, layout: NormLayout) -> Norm:
        bias = None if layout.bias is None else self._copy(layout.bias)
        return Norm(self._copy(layout.weight), bias)

    def _optional_norm(self, layout: NormLayout | None) -> Norm | None:
        return None if layout is None else self._norm(layout)

    def _optional_weight(self, layout: NormLayout | None) -> torch.Tensor | None:
        return None if layout is None else self._copy(layout.weight)

    def _copy(self, tensor: Tensor) -> torch.Tensor:
        return self._stack((tensor,), False)

    def _stack(self, tensors: Sequence[Tensor], transposed: bool) -> torch.Tensor:
        """The tensors along their first axis, in memory of their own.

        Never a view of the mapped file: a file that is truncated later would kill the process.
        """
        shapes = [tensor.shape[::-1] if transposed else tensor.shape for tensor in tensors]
        stacked = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self._dtype)
        row = 0
        for tensor, shape in zip(tensors, shapes, strict=True):
            stored = self._checkpoint.read(tensor)
            stacked[row : row + shape[0]].copy_(stored.T if transposed else stored)
            row += shape[0]
            self._done_bytes += self._checkpoint.stored_bytes(tensor)
            if self._progress is not None:
                self._progress(self._done_bytes, self._checkpoint.total_bytes)
        return stacked


def _lookup(table: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of a table [vocab, hidden] by token id."""
    return lambda token_ids: functional.embedding(token_ids, table)
