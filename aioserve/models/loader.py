"""Loading of a `Decoder`: weights that `reading` reads, placed on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aioserve.models.block_parts import Norm, Weights
from aioserve.models.blocks import DecoderLayer
from aioserve.models.decoder import Decoder, DecoderWeights
from aioserve.models.files import model_files
from aioserve.models.reading import ReadWeights, ReportBytes, WeightReading
from aioserve.ops import Backend, backend_named

__all__ = ["load_model", "make_decoder"]


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype | str = "auto",
    backend: Backend | None = None,
    progress: ReportBytes | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    memory_bytes: int | None = None,
    use_program: bool = True,
    kept_layers: Sequence[int] = (),
) -> Decoder:
    """Load the model at `path`: a directory in Hugging Face's layout, or a GGUF file.

    - dtype: float32, bfloat16 or float16, of weights, activations and KV pages. "auto" takes the
      checkpoint's. The native backend has no float16 and loads it as float32, which is exact.
    - backend: computes the model; None: `aioserve.ops.backend_named("auto")`.
    - max_model_len: longest context served, in tokens; None: the model's limit. With longrope, it
      also chooses between the factors for short and for long contexts.
    - quantization: format to which plain weights of linear layers are rounded while they are read:
      "int8", "int4" or "fp8"; None: they are not rounded.
    - memory_bytes: most bytes that the weights may take; None: no limit.
    - use_program: run all ops of a step in one call, if the backend can record them.
    - kept_layers: layers whose input is kept in each step, as in `Decoder`.

    Raises:
        ModelNotFoundError: the directory does not exist.
        UnsupportedModelError: an architecture or setting that isn't implemented.
        WeightsError: a file or tensor is missing, broken or of the wrong shape.
        ModelError: a malformed file, or weights beyond `memory_bytes`.
        ConfigError: an argument outside its range.
    """
    chosen = backend or backend_named()
    reading = WeightReading(
        model_files(path),
        dtype=dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch."),
        formats=chosen.formats,
        quantization=quantization,
        max_model_len=max_model_len,
        memory_bytes=memory_bytes,
    )
    with reading:
        weights = reading.read(progress)
    return make_decoder(weights, chosen, use_program=use_program, kept_layers=kept_layers)


def make_decoder(
    weights: ReadWeights,
    backend: Backend,
    *,
    use_program: bool = True,
    grouped: bool = True,
    kept_layers: Sequence[int] = (),
) -> Decoder:
    """Make a decoder of weights that were read in `backend`'s formats. The weights are used up.

    The other arguments are those of `Decoder`."""
    config, blocks = weights.config, Weights(weights, backend)
    with torch.no_grad():
        layout = weights.layout
        head = blocks.linear(layout.head, torch.float32)
        table = blocks.vector(config.embedding) if layout.has_table else head
        positions = None if config.positions is None else blocks.vector(config.positions)
        layers = tuple(DecoderLayer(layer, i, blocks) for i, layer in enumerate(config.layers))
        made = DecoderWeights(
            dtype=blocks.dtype,
            embedding=table,
            positions=positions,
            rotary_tables=blocks.rotary_tables,
            layers=layers,
            final_norm=Norm(config.final_norm, blocks),
            head=head,
            linears=blocks.linears,
            memory=weights.memory,
        )
    return Decoder(
        config,
        made,
        backend,
        weights.max_model_len,
        use_program=use_program,
        grouped=grouped,
        kept_layers=kept_layers,
    )
