"""Copy of a model directory with quantised linear layers.

Everything else stays the same, bit for bit: embedding, output layer, norms, biases, unused tensors,
and the files of tokenizer and settings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from aioserve.errors import ConfigError, ModelError
from aioserve.models.architecture import Tensor
from aioserve.models.checkpoint import weight_files
from aioserve.models.decoding import rounded
from aioserve.models.files import model_files
from aioserve.models.quantization.method import Method, OpenModel, scales_of
from aioserve.models.quantization.targets import (
    Written,
    beside,
    check_space,
    free_directory,
    move_directory,
    plain_config,
)
from aioserve.models.safetensors_file import SafetensorsFile
from aioserve.models.safetensors_writer import SHARD_BYTES, SafetensorsWriter, TensorSpec
from aioserve.models.stored import PLAIN, Plain, StoredTensor
from aioserve.progress_bar import OnProgress
from aioserve.text.template_files import ADDITIONAL

__all__ = ["write_quantized_copy"]

COPIED_FILES = (
    *("*.json", "*.jinja", f"{ADDITIONAL}/*.jinja"),
    *("*.model", "*.txt", "LICENSE*", "NOTICE*", "*.md"),
)
"""Patterns of files that are copied: settings, tokenizer, terms."""
_REPLACED_FILES = ("config.json", "*.safetensors.index.json", "*.bin.index.json")
_HEAD = "lm_head"
_COPY_BYTES = 4 << 20
_WEIGHT = ".weight"


def write_quantized_copy(
    model: Path,
    out: Path,
    method: Method,
    *,
    progress: OnProgress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the directory `out`, which must be empty or not exist.

    It appears when it is complete. Until then, everything is in a hidden directory next to it.
    `progress` is called with (bytes done, bytes in total) of tensors. Raises `ConfigError` naming
    `out` or `model` if they are unsuitable, and `ModelError` for a model that can't be read.
    """
    target = free_directory(out)
    files = model_files(model)
    config = plain_config(files)
    values, _ = files.config_values()
    with ExitStack() as stack:
        weights = stack.enter_context(files.weights(config))
        copy = _Copy(stack, OpenModel(files.path, config, weights), method, shard_bytes)
        check_space(target, copy.writer.num_bytes)
        with beside(target) as directory:
            _copy_files(files.path, directory)
            said = {**values, "quantization_config": method.config(copy.ignored)}
            (directory / "config.json").write_text(json.dumps(said, indent=2) + "\n", "utf-8")
            copy.write(directory, progress)
            move_directory(directory, target, out)
    return Written(copy.read_bytes, copy.writer.num_bytes, copy.writer.num_files)


class _Copy:
    """Tensors of one model, and the copy that is written of them."""

    def __init__(
        self, stack: ExitStack, model: OpenModel, method: Method, shard_bytes: int
    ) -> None:
        self._model = model
        self._method = method
        self._tensors = list(_tensors(stack, model.path))
        self._quantized = _linear_weights(model, method)
        self.ignored: list[str] = [
            _HEAD,
            *(
                one.name.removesuffix(_WEIGHT)
                for one in self._tensors
                if model.config.ignored.search(one.name)
                and one.name.endswith(_WEIGHT)
                and len(one.shape) > 1
            ),
            *(
                self._stored(tensor).name.removesuffix(_WEIGHT)
                for one in model.config.linears
                for tensor in one.weights
                if one.is_exact
            ),
        ]
        """Names of linear layers that stay plain, for quantization_config."""
        self.read_bytes: int = sum(one.num_bytes for one in self._tensors)
        self.writer: SafetensorsWriter = SafetensorsWriter(self._specs(), shard_bytes)

    def _specs(self) -> Iterator[TensorSpec]:
        for one in self._tensors:
            if (tensor := self._quantized.get(one.name)) is None:
                yield TensorSpec(one.name, one.dtype, one.shape, one.num_bytes)
                continue
            scales = scales_of(self._model.weights[tensor])
            parts = self._method.parts(tensor.rows, tensor.columns, scales)
            for rest, (dtype, shape) in parts.items():
                yield TensorSpec.of(_part(one.name, rest), dtype, shape)

    def write(self, directory: Path, progress: OnProgress | None) -> None:
        done = 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None and num_bytes:
                progress(done, self.read_bytes)

        def write_parts(
            tensor: Tensor, first: int, end: int, parts: Mapping[str, np.ndarray]
        ) -> None:
            stored = self._stored(tensor)
            for rest, array in parts.items():
                row_bytes = array.nbytes // max(end - first, 1)
                self.writer.write(_part(stored.name, rest), array, first * row_bytes)
            count(stored.num_bytes // tensor.rows * (end - first))

        with self.writer.open(directory):
            vectors = self._method.encode(self._model, write_parts)
            changed = {self._stored(tensor).name: v for tensor, v in vectors.items()}
            for one in self._tensors:
                if one.name in changed:
                    self.writer.write(one.name, rounded(changed[one.name], PLAIN[one.dtype]))
                    count(one.num_bytes)
                elif one.name not in self._quantized:
                    self._copy(one, count)

    def _stored(self, tensor: Tensor) -> StoredTensor:
        return self._model.weights[tensor].parts["weight"]

    def _copy(self, one: StoredTensor, count: Callable[[int], None]) -> None:
        for at in range(0, one.num_bytes, _COPY_BYTES):
            size = min(_COPY_BYTES, one.num_bytes - at)
            self.writer.write(one.name, one.read_bytes(at, size), at)
            count(size)


def _tensors(stack: ExitStack, directory: Path) -> Iterator[StoredTensor]:
    for path, names in weight_files(directory).items():
        file = SafetensorsFile(path)
        stack.callback(file.close)
        for name, stored in file.tensors.items():
            if names is None or name in names:
                yield stored


def _linear_weights(model: OpenModel, method: Method) -> dict[str, Tensor]:
    """Weights of linear layers, by their names in the files."""
    found: dict[str, Tensor] = {}
    for described in model.config.rounded_linears:
        for tensor in described.weights:
            linear = model.weights[tensor]
            name = linear.parts["weight"].name
            if tensor.turns is not None:
                raise ConfigError(
                    f"model must store projections one after the other, and stores their rows in "
                    f"turns in {name}: no quantised weights are written for these",
                    argument="model",
                )
            if not isinstance(linear.format, Plain) or linear.format.transposed:
                raise ConfigError(
                    f"model must store the weights of linear layers as [out, in], and stores "
                    f"{name} as [in, out]: no format of quantised weights is for these",
                    argument="model",
                )
            method.check(name.removesuffix(_WEIGHT), linear.out_features, linear.in_features)
            found[name] = tensor
    return found


def _part(weight: str, rest: str) -> str:
    return f"{weight.removesuffix(_WEIGHT)}.{rest}"


def _copy_files(model: Path, directory: Path) -> None:
    for pattern in COPIED_FILES:
        for file in sorted(model.glob(pattern)):
            if file.is_file() and not any(map(file.match, _REPLACED_FILES)):
                target = directory / file.relative_to(model)
                try:
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target)
                except OSError as error:
                    raise ModelError(f"{file} can't be copied: {error.strerror}") from error
