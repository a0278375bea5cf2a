"""Methods of `aioserve quantize`, which write the weights of linear layers in fewer bits.

A `Method` describes the parts in files, and encodes the weights of an open model. Most round each
weight on its own, some rows at a time. Methods that compute a text first are in `calibrated`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aioserve.errors import ConfigError, WeightsError
from aioserve.models.architecture import Tensor
from aioserve.models.config import DecoderConfig
from aioserve.models.stored import Floats, StoredLinear, StoredWeights

__all__ = [
    "CALIBRATED",
    "Method",
    "OpenModel",
    "RoundingMethod",
    "Scaling",
    "Shapes",
    "WriteParts",
    "check_groups",
    "scales_of",
]

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of the parts of a weight, by their names without the module's."""


CALIBRATED = ("gptq", "awq")
"""Names of methods that need a text."""


class OpenModel(NamedTuple):
    """Model with plain weights in open files."""

    path: Path
    config: DecoderConfig
    weights: StoredWeights


WriteParts = Callable[[Tensor, int, int, Mapping[str, np.ndarray]], None]
"""Function that writes parts of a weight: (weight, first row, end row, parts of these rows).

Parts have the names of `Method.parts`."""


@dataclass(frozen=True)
class Scaling:
    """Factors on rows and columns of weights, and vectors that compensate for them.

    Together they change only the rounding."""

    inputs: Mapping[Tensor, Floats] = field(default_factory=dict)
    """Factors on columns, float32 [in]."""
    outputs: Mapping[Tensor, Floats] = field(default_factory=dict)
    """Divisors of rows, float32 [out], applied after `inputs`."""
    vectors: Mapping[Tensor, Floats] = field(default_factory=dict)
    """Vectors that replace norms and biases."""

    def rows(self, tensor: Tensor, stored: StoredLinear, first: int, end: int) -> Floats:
        """Read and scale rows `first` to `end` of a weight: float32 [rows, in]."""
        weight = stored.floats(first, end)
        if (inputs := self.inputs.get(tensor)) is not None:
            weight = weight * inputs
        if (outputs := self.outputs.get(tensor)) is not None:
            weight = weight / outputs[first:end, None]
        return weight


class Method(ABC):
    """Way to store the weights of linear layers."""

    name: str

    @abstractmethod
    def config(self, ignored: list[str]) -> dict[str, Any]:
        """Return the `quantization_config`. `ignored` names the linear layers that stay plain."""

    @abstractmethod
    def check(self, module: str, rows: int, columns: int) -> None:
        """Raise `ConfigError` for a layer that this method can't store."""

    @abstractmethod
    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        """Return the parts of a weight whose scales have the precision of `scales`: F32 or BF16."""

    @abstractmethod
    def encode(self, model: OpenModel, write: WriteParts) -> Mapping[Tensor, Floats]:
        """Write the weight of every linear layer, whole or some rows at a time.

        Returns vectors that replace those of the model. Raises `WeightsError` for NaN and
        infinity."""


class RoundingMethod(Method):
    """Method that rounds each weight on its own, some rows at a time."""

    @abstractmethod
    def encoded(self, weight: Floats, scales: str) -> dict[str, np.ndarray]:
        """Encode some rows, float32 [rows, in], into the parts that `parts` names.

        Each array has the bytes of its part's dtype. Raises `WeightsError` for NaN and infinity."""

    def encode(self, model: OpenModel, write: WriteParts) -> Mapping[Tensor, Floats]:
        return self.encode_scaled(model, write, Scaling())

    def encode_scaled(
        self, model: OpenModel, write: WriteParts, scaling: Scaling
    ) -> Mapping[Tensor, Floats]:
        """`encode`, but scale weights before they are rounded."""
        for described in model.config.rounded_linears:
            for tensor in described.weights:
                stored = model.weights[tensor]
                for first, end in self.blocks(stored):
                    weight = scaling.rows(tensor, stored, first, end)
                    try:
                        parts = self.encoded(weight, scales_of(stored))
                    except WeightsError as error:
                        raise WeightsError(f"{stored.name}: {error}") from error
                    write(tensor, first, end, parts)
                write(tensor, 0, 0, self.of_all_rows(tensor.rows, tensor.columns))
        return scaling.vectors

    def of_all_rows(self, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Return parts of a weight that are stored once, and depend only on its shape."""
        return {}

    def blocks(self, stored: StoredLinear) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows to round at once."""
        return stored.blocks()


def scales_of(stored: StoredLinear) -> str:
    """Precision of the scales for a plain weight, F32 or BF16."""
    return "BF16" if stored.parts["weight"].dtype == "BF16" else "F32"


def check_groups(group_size: int, module: str, columns: int) -> None:
    """Raise `ConfigError` if `group_size` does not divide a layer's inputs."""
    if columns % group_size:
        raise ConfigError(
            f"group_size must divide the inputs of every linear layer, got {group_size}, and "
            f"{module} has {columns}; int8, w8a8 and fp8 have no groups",
            argument="group_size",
            value=group_size,
        )
