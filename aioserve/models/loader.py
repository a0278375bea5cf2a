"""Makes a `Decoder` of a model directory: the weights that `reading` has read, on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aioserve.models import architecture
from aioserve.models.architecture import Tensor
from aioserve.models.blocks import DecoderLayer, Norm
from aioserve.models.decoder import Decoder, DecoderWeights
from aioserve.models.reading import ReadWeights, ReportBytes, WeightReading
from aioserve.models.rope import RopeConfig
from aioserve.models.rotary import RotaryTable
from aioserve.ops import Backend, Linear, backend_named

__all__ = ["load_model", "make_decoder"]


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

    dtype: float32, bfloat16 or float16, of weights, activations and KV pages. "auto" is the
        checkpoint's. The native backend knows no float16: such a checkpoint becomes float32 there,
        which holds its values exactly.
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
    chosen = backend or backend_named()
    reading = WeightReading(
        Path(path),
        dtype=dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch."),
        packed=chosen.packs_weights,
        max_model_len=max_model_len,
        memory_bytes=memory_bytes,
    )
    with reading:
        weights = reading.read(progress)
    return make_decoder(weights, chosen, use_program=use_program)


def make_decoder(weights: ReadWeights, backend: Backend, *, use_program: bool = True) -> Decoder:
    """Make a decoder of weights that are packed if the backend's are. The weights are used up."""
    with torch.no_grad():
        made = _Maker(weights, backend).decoder_weights()
    return Decoder(weights.config, made, backend, weights.max_model_len, use_program=use_program)


class _Maker:
    """Hands the weights to the blocks that are made of them."""

    def __init__(self, weights: ReadWeights, backend: Backend) -> None:
        self.backend = backend
        self._weights = weights
        self._dtype: torch.dtype = getattr(torch, weights.dtype)
        self._tables: dict[RopeConfig, RotaryTable] = {}

    def decoder_weights(self) -> DecoderWeights:
        config = self._weights.config
        head = self._linear(self._weights.head, torch.float32)
        table = self.vector(config.embedding) if self._weights.has_table else head
        positions = None if config.positions is None else self.vector(config.positions)
        layers = tuple(DecoderLayer(layer, i, self) for i, layer in enumerate(config.layers))
        return DecoderWeights(
            dtype=self._dtype,
            embedding=table,
            positions=positions,
            rotary_tables=tuple(self._tables.values()),
            layers=layers,
            final_norm=Norm(config.final_norm, self),
            head=head,
        )

    def linear(self, described: architecture.Linear) -> Linear:
        return self._linear(described, None)

    def vector(self, tensor: Tensor) -> torch.Tensor:
        return self.backend.place(self._tensor(tensor))

    def rotary(self, rope: RopeConfig) -> RotaryTable:
        if rope not in self._tables:
            limit = self._weights.max_model_len
            self._tables[rope] = RotaryTable(rope, limit, self.backend.device)
        return self._tables[rope]

    def _linear(self, described: architecture.Linear, out_dtype: torch.dtype | None) -> Linear:
        if self._weights.packed:
            packed = self._weights.linears.pop(described)
            return self.backend.packed_linear(packed, out_dtype=out_dtype)
        weight = self._stacked(described.weights, described.transposed)
        bias = self._stacked(described.biases) if described.biases else None
        return self.backend.linear(weight, bias, out_dtype=out_dtype)

    def _stacked(self, tensors: Sequence[Tensor], transposed: bool = False) -> torch.Tensor:
        stored = [self._tensor(tensor) for tensor in tensors]
        return torch.cat([tensor.T for tensor in stored] if transposed else stored)

    def _tensor(self, tensor: Tensor) -> torch.Tensor:
        return torch.from_numpy(self._weights.arrays[tensor]).view(self._dtype)
