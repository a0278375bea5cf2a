"""From a model directory to a `Decoder`: reads, converts, fuses and packs the weights.

Tensors are read one at a time from mapped files and packed at once, so that peak memory stays near
the size of the packed model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from aioserve.errors import ConfigError, ModelError, ModelNotFoundError
from aioserve.models import architecture
from aioserve.models.architecture import Tensor
from aioserve.models.blocks import DecoderLayer, norm
from aioserve.models.checkpoint import Checkpoint
from aioserve.models.config import DecoderConfig
from aioserve.models.decoder import Decoder, DecoderWeights
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, Linear, backend_named

__all__ = ["ReportBytes", "load_model"]

ReportBytes = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) after each tensor."""

TWO_COPIES_BYTES = 64 << 20
"""An embedding that is the output layer too is kept once, packed, if it is larger than this. Rows
of packed weights are slower to read, which shows in small models."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype | str = "auto",
    backend: Backend | None = None,
    progress: ReportBytes | None = None,
    max_model_len: int | None = None,
    memory_bytes: int | None = None,
    use_program: bool = True,
) -> Decoder:
    """Load the Hugging Face model in the directory `path`.

    dtype: float32 or bfloat16, of weights, activations and KV pages. "auto" is the checkpoint's;
        a float16 checkpoint becomes float32, which holds its values exactly.
    backend: computes the model; None: `aioserve.ops.backend_named("auto")`.
    max_model_len: longest context in tokens to be served; None: all the model has. With longrope it
        also chooses between the factors for short and for long contexts.
    memory_bytes: what the weights may take at most; None: anything.
    use_program: run all ops of a step by one call, where the backend can record them.

    Raises:
        ModelNotFoundError: no such directory.
        UnsupportedModelError: an architecture or setting that isn't implemented.
        WeightsError: no weights, or a file or tensor missing, broken or of the wrong shape.
        ModelError: a malformed file, or weights beyond `memory_bytes`.
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
    chosen = backend or backend_named()
    with Checkpoint(directory, config) as checkpoint, torch.no_grad():
        in_dtype = _choose_dtype(dtype, config, checkpoint)
        needed = checkpoint.total_values * in_dtype.itemsize
        if memory_bytes is not None and needed > memory_bytes:
            raise ModelError(
                f"{directory}: the weights take {needed} bytes in {in_dtype}, and there are "
                f"{memory_bytes} bytes of memory"
            )
        reader = _Reader(checkpoint, chosen, in_dtype, length, progress)
        weights = reader.decoder_weights(config)
    return Decoder(config, weights, chosen, length, use_program=use_program)


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
    """Reads tensors of one checkpoint into `dtype` and hands them to `backend`, counting bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        dtype: torch.dtype,
        max_positions: int,
        progress: ReportBytes | None,
    ) -> None:
        self.backend = backend
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._max_positions = max_positions
        self._progress = progress
        self._done_bytes = 0
        self._tables: dict[RopeConfig, RotaryTable] = {}

    def decoder_weights(self, config: DecoderConfig) -> DecoderWeights:
        embedding = self._stack((config.embedding,))
        head, shared = self._head(config, embedding)
        packed_alone = shared and embedding.nbytes > TWO_COPIES_BYTES
        table = head if packed_alone else self.backend.place(embedding)
        del embedding
        positions = None if config.positions is None else self.vector(config.positions)
        layers = tuple(DecoderLayer(layer, i, self) for i, layer in enumerate(config.layers))
        return DecoderWeights(
            dtype=self._dtype,
            embedding=table,
            positions=positions,
            rotary_tables=tuple(self._tables.values()),
            layers=layers,
            final_norm=norm(config.final_norm, self),
            head=head,
        )

    def linear(self, described: architecture.Linear) -> Linear:
        weight = self._stack(described.weights, described.transposed)
        bias = self._stack(described.biases) if described.biases else None
        return self.backend.linear(weight, bias)

    def vector(self, tensor: Tensor) -> torch.Tensor:
        return self.backend.place(self._stack((tensor,)))

    def rotary(self, rope: RopeConfig) -> RotaryTable:
        if rope not in self._tables:
            self._tables[rope] = RotaryTable(rope, self._max_positions, self.backend.device)
        return self._tables[rope]

    def _head(self, config: DecoderConfig, embedding: torch.Tensor) -> tuple[Linear, bool]:
        """The output layer, and whether it is the embedding."""
        weight = embedding
        if config.head in self._checkpoint:
            # Some files store the tied head once more. Where it differs from the embedding the
            # file is right and config.json isn't; transformers decides the same.
            own = self._stack((config.head,))
            tied = config.tie_word_embeddings and torch.equal(own, embedding)
            weight = embedding if tied else own
        return self.backend.linear(weight, out_dtype=torch.float32), weight is embedding

    def _stack(self, tensors: Sequence[Tensor], transposed: bool = False) -> torch.Tensor:
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
