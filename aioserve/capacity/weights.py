"""Memory that the weights of a model take whose files are here, by the formats in the files.

Files are opened, and single rows of their weights read; nothing is loaded.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from aioserve.capacity.models import PRESETS
from aioserve.config import Quantization
from aioserve.errors import ConfigError, UnsupportedModelError
from aioserve.formats.weights import CUDA, NATIVE, ComputedFormats
from aioserve.isolation import shown
from aioserve.models.files import ModelFiles, model_files
from aioserve.models.known import BUNDLED_KINDS, KnownKinds
from aioserve.models.reading import WeightReading
from aioserve.models.resolve import resolve
from aioserve.models.stored import PLAIN
from aioserve.models.weight_memory import WeightMemory

__all__ = ["ModelWeights", "read_weights", "weights_of"]


class ModelWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one model, as engines hold them in the model's own dtype."""

    on_cpu: WeightMemory
    """Memory that the native backend takes."""
    on_gpu: WeightMemory

    def on(self, cpu: bool) -> WeightMemory:
        """Return the memory on a CPU, or on a GPU."""
        return self.on_cpu if cpu else self.on_gpu

    @property
    def are_quantised(self) -> bool:
        """True if some aren't plain floats."""
        return not all(one.format in PLAIN.values() for one in self.on_cpu.formats)


def read_weights(
    name: str, quantization: str | None = None, known: KnownKinds = BUNDLED_KINDS
) -> ModelWeights | None:
    """Return the weights of the model that `name` stands for, as in `read_model`.

    None: it is a preset or a config.json, its weights aren't here, or the engine refuses it.
    `quantization` has an engine's values: "int8", "int4" or "fp8". Raises `ModelError` for
    files that can't be read, and `ConfigError` for another method, or if there are no
    weights to quantise.
    """
    methods = get_args(Quantization)
    if quantization is not None and quantization not in methods:
        raise ConfigError(
            f"quantization must be one of {', '.join(methods)}, got {shown(quantization)}",
            argument="quantization",
            value=quantization,
        )
    files = None
    if name not in PRESETS and not name.endswith(".json"):
        files = model_files(resolve(name), known=known)
    if files is not None and files.weight_file_bytes():
        try:
            return weights_of(files, quantization)
        except UnsupportedModelError:
            if quantization is not None:
                raise
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} needs a model whose weights are here, and {name} has "
            "none: leave it out, or give dtype",
            argument="quantization",
            value=quantization,
        )
    return None


def weights_of(files: ModelFiles, quantization: str | None = None) -> ModelWeights:
    """Return the same as `read_weights`, for a model in files. Raises like `WeightReading`."""

    def held(formats: ComputedFormats) -> WeightMemory:
        with WeightReading(files, formats=formats, quantization=quantization) as reading:
            return reading.expected_memory

    # Sizes that GPUs have no kernels for need as much memory there.
    any_sizes = msgspec.structs.replace(CUDA, attention=None)
    return ModelWeights(on_cpu=held(NATIVE), on_gpu=held(any_sizes))
