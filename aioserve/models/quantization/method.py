"""Ways to write the weights of linear layers in fewer bits: what `aioserve quantize` chooses from.

A `Method` says what the files hold, and encodes the weights of an open model. Most round each
weight by itself, some rows at a time; those that compute a text first are in `calibrated`.
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
"""Dtype and shape of the parts of a weight, by the names behind the module's."""


CALIBRATED = ("gptq", "awq")
"""Names of methods that need a text."""


class OpenModel(NamedTuple):
    """A model whose weights are plain and can be read."""

    path: Path
    config: DecoderConfig
    weights: StoredWeights


WriteParts = Callable[[Tensor, int, int, Mapping[str, np.ndarray]], None]
"""Is called with a weight, the first and the end of a range of its rows, and what is stored of
these rows, by the names of `Method.parts`."""


@dataclass(frozen=True)
class Scaling:
    """Factors of the rows and columns of weights, and vectors that make up for them: together they
    change nothing but the rounding."""

    inputs: Mapping[Tensor, Floats] = field(default_factory=dict)
    """float32 [in]: what columns are multiplied by."""
    outputs: Mapping[Tensor, Floats] = field(default_factory=dict)
    """float32 [out]: what rows are divided by, once columns have been multiplied."""
    vectors: Mapping[Tensor, Floats] = field(default_factory=dict)
    """What takes the place of norms and biases."""

    def rows(self, tensor: Tensor, stored: StoredLinear, first: int, end: int) -> Floats:
        """Rows `first` to `end` of a weight, scaled: float32 [rows, in]."""
        weight = stored.floats(first, end)
        if (inputs := self.inputs.get(tensor)) is not None:
            weight = weight * inputs
        if (outputs := self.outputs.get(tensor)) is not None:
            weight = weight / outputs[first:end, None]
        return weight


class Method(ABC):
    """One way to store the weights of linear layers."""

    name: str

    @abstractmethod
    def config(self, ignored: list[str]) -> dict[str, Any]:
        """`quantization_config` of config.json; `ignored` are the linear layers that stay plain."""

    @abstractmethod
    def check(self, module: str, rows: int, columns: int) -> None:
        """Raise `ConfigError` for a layer that can't be stored so."""

    @abstractmethod
    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        """What is stored of a weight whose scales have the precision of that dtype, F32 or BF16."""

    @abstractmethod
    def encode(self, model: OpenModel, write: WriteParts) -> Mapping[Tensor, Floats]:
        """Write every linear layer's weight, whole or some rows at a time. Returns vectors that
        take the place of the model's. Raises `WeightsError` for NaN and infinity."""


class RoundingMethod(Method):
    """Rounds each weight by itself, some rows at a time."""

    @abstractmethod
    def encoded(self, weight: Floats, scales: str) -> dict[str, np.ndarray]:
        """What is stored of some rows, float32 [rows, in], by the names of `parts`; each array has
        the bytes of its dtype. Raises `WeightsError` for NaN and infinity."""

    def encode(self, model: OpenModel, write: WriteParts) -> Mapping[Tensor, Floats]:
        return self.encode_scaled(model, write, Scaling())

    def encode_scaled(
        self, model: OpenModel, write: WriteParts, scaling: Scaling
    ) -> Mapping[Tensor, Floats]:
        """`encode`, with weights scaled before they are rounded."""
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
        """What is stored of a weight once, whatever its numbers are."""
        return {}

    def blocks(self, stored: StoredLinear) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are rounded at once."""
        return stored.blocks()


def scales_of(stored: StoredLinear) -> str:
    """The precision that the scales of a plain weight have."""
    return "BF16" if stored.parts["weight"].dtype == "BF16" else "F32"


def check_groups(group_size: int, module: str, columns: int) -> None:
    """Raise `ConfigError` for a layer of so many inputs that groups don't divide."""
    if columns % group_size:
        raise ConfigError(
            f"group_size must divide the inputs of every linear layer, got {group_size}, and "
            f"{module} has {columns}; int8, w8a8 and fp8 have no groups",
            argument="group_size",
            value=group_size,
        )
