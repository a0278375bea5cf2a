"""Conversion of a model directory to one GGUF file, with weights in a mixture of formats.

The file also has the config, the tokenizer and the chat template. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.models.architecture import Tensor
from aioserve.models.config import DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.gguf.encoding import encoded
from aioserve.models.gguf.formats import FORMATS, Floats
from aioserve.models.gguf.mixes import Mix
from aioserve.models.gguf.names import stored_name
from aioserve.models.gguf.settings import Settings, settings_of
from aioserve.models.gguf.vocabulary import vocabulary_of
from aioserve.models.gguf.weights import norm_offset, paired_heads, paired_rows
from aioserve.models.gguf.writing import GGUFTensor, GGUFWriter
from aioserve.models.quantization.targets import (
    Written,
    beside,
    check_space,
    free_file,
    move_file,
    plain_config,
)
from aioserve.models.stored import StoredWeights, same_bits
from aioserve.progress_bar import OnProgress

__all__ = ["write_gguf"]

_VECTOR = next(form for form in FORMATS.values() if form.name == "F32")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(?:weight|bias)")


def write_gguf(model: Path, out: Path, mix: Mix, *, progress: OnProgress | None = None) -> Written:
    """Write the file `out`, which must end with .gguf and not exist.

    It appears when it is complete. Until then, it is in a hidden directory next to `out`.
    `progress` is called with (bytes done, bytes in total) of tensors. Raises `ConfigError` naming
    `out` or `model` if they are unsuitable, and `ModelError` for a model that can't be read.
    """
    target = free_file(out, ".gguf")
    files = model_files(model)
    config = plain_config(files)
    with files.weights(config) as weights:
        own_head = _has_own_head(config, weights)
        settings = settings_of(config, mix.number, own_head=own_head)
        tokenizer, template = files.tokenizer(), files.chat_template()
        ended = replace(config, eos_token_ids=files.ends(config, tokenizer))
        said = settings.metadata | vocabulary_of(files.path, ended, tokenizer, template)
        tensors = [*config.required, *([config.head] if own_head else [])]
        copy = _Copy(config, weights, settings, tensors, said, mix)
        check_space(target, copy.writer.num_bytes)
        with beside(target) as directory:
            file = directory / "model.gguf"
            with copy.writer.open(file):
                copy.write(progress)
            move_file(file, target, out)
    return Written(copy.read_bytes, copy.writer.num_bytes, 1)


def _has_own_head(config: DecoderConfig, weights: StoredWeights) -> bool:
    """True if the output layer is a weight of its own, not the embedding."""
    if config.head not in weights:
        return False
    return not (
        config.tie_word_embeddings and same_bits(weights[config.head], weights[config.embedding])
    )


class _Copy:
    """Tensors of one model, and the file that is written of them."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: StoredWeights,
        settings: Settings,
        tensors: list[Tensor],
        metadata: dict[str, Any],
        mix: Mix,
    ) -> None:
        self._config = config
        self._weights = weights
        self._settings = settings
        self._mix = mix
        own_head = config.head in tensors
        self._output = config.head if own_head else config.embedding
        self._tensors = {self._described(tensor): tensor for tensor in tensors}
        extra = [GGUFTensor(name, _VECTOR, v.shape) for name, v in settings.vectors.items()]
        self.read_bytes: int = sum(weights[tensor].num_bytes for tensor in tensors)
        self.writer: GGUFWriter = GGUFWriter(metadata, [*extra, *self._tensors])

    def _described(self, tensor: Tensor) -> GGUFTensor:
        name = stored_name(self._settings.family, tensor.name) or tensor.name
        if len(tensor.shape) == 1 or tensor == self._config.positions:
            return GGUFTensor(name, _VECTOR, tensor.shape)
        found = _LAYER.fullmatch(name)
        form = self._mix.form(
            name if found is None else found[2],
            tensor.columns,
            None if found is None else int(found[1]),
            self._config.num_layers,
            is_output=tensor == self._output,
        )
        return GGUFTensor(name, form, (tensor.rows, tensor.columns))

    def write(self, progress: OnProgress | None) -> None:
        for name, vector in self._settings.vectors.items():
            self.writer.write(name, vector.view(np.uint8))
        done = 0
        for described, tensor in self._tensors.items():
            stored = self._weights[tensor]
            for first, rows in self._rows(tensor):
                try:
                    blocks = encoded(described.form, rows)
                except WeightsError as error:
                    raise WeightsError(f"{stored.name}: {error}") from error
                self.writer.write(described.name, blocks, first * blocks.shape[1])
                done += stored.num_bytes // tensor.rows * len(rows)
                if progress is not None:
                    progress(done, self.read_bytes)

    def _rows(self, tensor: Tensor) -> Iterator[tuple[int, Floats]]:
        """Yield blocks of rows in the order of the file, each with the index of its first row."""
        stored = self._weights[tensor]
        blocks = stored.blocks()
        heads = paired_heads(self._settings.family, self._config.heads, tensor)
        if not heads:
            more = np.float32(norm_offset(self._config, tensor))
            for first, end in blocks:
                rows = stored.floats(first, end)
                yield first, rows + more if more else rows
            return
        whole: npt.NDArray[np.float32] = np.empty((tensor.rows, tensor.columns), np.float32)
        whole[paired_rows(0, tensor.rows, tensor.rows // heads)] = stored.floats()
        for first, end in blocks:
            yield first, whole[first:end]
