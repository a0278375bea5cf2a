"""The device that a model is loaded for, before its libraries are imported.

Imports no torch: files are read while that is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.config import EngineConfig, Speculation, used_backend
from aioserve.errors import ConfigError
from aioserve.execution.devices import chosen_device
from aioserve.execution.imports import import_without_collecting
from aioserve.formats.weights import CUDA, NATIVE, PLAIN_FLOATS, ComputedFormats

if TYPE_CHECKING:
    from aioserve.execution.loading.place import Placement

__all__ = ["Target", "target_of"]


class Target(ABC):
    """A device by its name. `formats` are the formats of weights that its backend computes."""

    formats: ComputedFormats

    def check(self, speculation: Speculation) -> None:
        """Raise `ConfigError` unless draft tokens of a draft model or head can be verified as
        asked.

        By default all can.
        """
        return

    @abstractmethod
    def placement(self) -> Placement[Any, Any]:
        """Import what the device needs, and open it. Call it in a thread. Raises `ConfigError`."""


class _Cpu(Target):
    def __init__(self, config: EngineConfig) -> None:
        is_native = used_backend(config.backend) == "native"
        self.formats = _formats(NATIVE, config) if is_native else PLAIN_FLOATS

    def placement(self) -> Placement[Any, Any]:
        return import_without_collecting("aioserve.execution.loading.cpu").CpuPlacement()


class _Cuda(Target):
    def __init__(self, name: str, config: EngineConfig) -> None:
        self._name = name
        self.formats = _formats(CUDA, config)

    def check(self, speculation: Speculation) -> None:
        if speculation.acceptance == "rejection":
            raise ConfigError(
                f'acceptance must be "match" where a draft model or head drafts on {self._name}, '
                'got "rejection": on a GPU no draft tokens are verified by rejection sampling',
                argument="speculation",
                value=speculation,
            )

    def placement(self) -> Placement[Any, Any]:
        cuda = import_without_collecting("aioserve.execution.loading.cuda")
        return cuda.CudaPlacement.open(self._name)


def target_of(config: EngineConfig) -> Target:
    """Return the device that options ask for. Raises `ConfigError` if it can't be used."""
    name = chosen_device(config)
    return _Cpu(config) if name == "cpu" else _Cuda(name, config)


def _formats(computed: ComputedFormats, config: EngineConfig) -> ComputedFormats:
    in_floats = config.activation_quantization == "none"
    return msgspec.structs.replace(computed, integer_activations=not in_floats)
